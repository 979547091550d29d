// What one message looks like, the welcome before the first one, and the line of facts under an answer.

import { element, icon } from "./dom.js";
import { markdown } from "./markdown.js";

const SUGGESTIONS = ["Explain what a compiler does, in three sentences", "Write a haiku about rain",
                     "Give me a Python function that reverses a string"];

// `send` is called with the text of a suggestion.
export function welcome(served, send) {
  if (served?.chat === false) {
    return element("div", { className: "welcome" }, element("h2", {}, "This model does not chat"),
                   element("p", {}, served.embedding_size ? "It is served for its API: /v1/embeddings."
                     : "It has no chat template. It is served for its API: /v1/completions continues texts."));
  }
  const suggestions = SUGGESTIONS.map(text => {
    const button = element("button", { type: "button" }, text);
    button.onclick = () => send(text);
    return button;
  });
  return element("div", { className: "welcome" }, element("h2", {}, "What would you like to know?"),
                 element("div", { className: "suggestions" }, ...suggestions));
}

// `busy`: it still grows; `last`: nothing follows it. `edit` and `regenerate` are called on clicks.
export function messageNode(message, { busy, last, edit, regenerate }) {
  const meta = element("div", { className: "meta" });
  const node = element("article", { className: `message ${message.role}` });
  if (message.role === "user") {
    node.append(element("div", { className: "body" }, message.content), meta);
    meta.append(action("edit", "Edit", edit));
    return node;
  }
  const body = element("div", { className: "answer" }, ...markdown(message.content));
  if (busy && !message.content) body.classList.add("waiting");
  node.append(body);
  if (message.error) node.append(element("div", { className: "error", role: "alert" }, message.error));
  if (!busy) {
    if (message.facts) meta.append(element("span", { className: "facts" }, message.facts));
    if (message.content) meta.append(action("copy", "Copy", event => copy(message.content, event.currentTarget)));
    if (last) meta.append(action("again", message.error ? "Try again" : "Regenerate", regenerate));
  }
  node.append(meta);
  return node;
}

function action(name, label, onclick) {
  return element("button", { type: "button", className: name, onclick }, icon(name), element("span", {}, label));
}

export function facts({ usage, firstSeconds, decodeSeconds, finish }) {
  if (!usage) return "";
  const { prompt_tokens: prompt, completion_tokens: output } = usage, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${output} ${output === 1 ? "token" : "tokens"}`];
  if (decodeSeconds > 0 && output > 1) parts.push(`${((output - 1) / decodeSeconds).toFixed(1)} tokens/s`);
  if (firstSeconds !== null) parts.push(`first in ${firstSeconds.toFixed(2)} s`);
  parts.push(`${cached} of ${prompt} prompt tokens cached`);
  if (finish === "length") parts.push("cut off");
  return parts.join(" · ");
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {       // clipboard needs https or localhost
    const area = element("textarea", { value: text, className: "sr" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = button.querySelector("span") ?? button, before = label.textContent;
  if (before === "Copied") return;
  label.textContent = "Copied";
  setTimeout(() => { label.textContent = before; }, 1200);
}
