// The chat page: what happens on clicks and keys. Conversations are in store.js, requests in api.js, text in markdown.js.

import { answer, model as askModel } from "./api.js";
import { element, markdown } from "./markdown.js";
import { Store } from "./store.js";

const $ = id => document.getElementById(id);
const SUGGESTIONS = ["Explain what a compiler does, in three sentences", "Write a haiku about rain",
                     "Give me a Python function that reverses a string"];
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any", hint: "1" },
  { name: "top_p", label: "Top p", min: 0.0001, max: 1, step: "any", hint: "1" },
  { name: "top_k", label: "Top k", min: 0, max: 1e6, step: 1, hint: "off" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", hint: "off" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.0001, max: 100, step: "any", hint: "1" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any", hint: "0" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any", hint: "0" },
  { name: "max_tokens", label: "Most tokens", min: 1, max: 1e9, step: 1, hint: "what fits" },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 53 - 1, step: 1, hint: "random" },
];
const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const ICONS = {
  auto: '<circle cx="12" cy="12" r="7.5"/><path d="M12 4.5v15a7.5 7.5 0 0 0 0-15z" fill="currentColor"/>',
  light: '<circle cx="12" cy="12" r="4"/><path d="M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6 7 7M17 17l1.4 1.4M5.6 18.4 7 17M17 7l1.4-1.4"/>',
  dark: '<path d="M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z"/>',
  remove: '<path d="M6 6l12 12M18 6L6 18"/>', again: '<path d="M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4"/>',
  copy: '<rect x="8.5" y="8.5" width="11" height="11" rx="2"/><path d="M15.5 5.5a1 1 0 0 0-1-1h-8a2 2 0 0 0-2 2v8a1 1 0 0 0 1 1"/>',
  edit: '<path d="M5 19h3.2L18.5 8.7a1.6 1.6 0 0 0 0-2.3l-.9-.9a1.6 1.6 0 0 0-2.3 0L5 15.8z"/>',
};
const store = new Store();
const running = new Map();      // conversation → {controller, message}; an answer goes on while another one is read
let served = null, stick = true, frame = 0;

function icon(name) {
  const holder = document.createElement("template");
  holder.innerHTML = `<svg viewBox="0 0 24 24" aria-hidden="true">${ICONS[name]}</svg>`;   // our own constants only
  return holder.content.firstChild;
}

// --- what is shown ---

function showAll() {
  showList();
  showMessages();
  showBusy();
}

function showList() {
  $("conversations").replaceChildren(...store.conversations.map(conversation => {
    const open = element("button", { type: "button", className: "open", title: conversation.title }, conversation.title || "…");
    open.onclick = () => { store.open(conversation); stick = true; showAll(); closeSidebar(); $("input").focus(); };
    const remove = element("button", { type: "button", className: "icon remove" }, icon("remove"));
    remove.setAttribute("aria-label", `Delete “${conversation.title}”`);
    remove.onclick = () => {
      running.get(conversation)?.controller.abort();
      store.remove(conversation);
      showAll();
    };
    const row = element("li", {}, open, remove);
    row.classList.toggle("current", conversation === store.current);
    row.classList.toggle("busy", running.has(conversation));
    if (conversation === store.current) open.setAttribute("aria-current", "true");
    return row;
  }));
}

function showMessages() {
  const { messages, system } = store.current;
  document.title = store.current.title ? `${store.current.title} · relaxpack` : "relaxpack chat";
  if (!messages.length) {
    $("messages").replaceChildren(welcome());
    return;
  }
  const shown = messages.map((message, index) => messageNode(message, index));
  if (system) shown.unshift(element("article", { className: "message system" }, element("div", { className: "body" }, system)));
  $("messages").replaceChildren(...shown);
  scroll();
}

function welcome() {
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

function messageNode(message, index) {
  const busy = running.get(store.current)?.message === message;
  const meta = element("div", { className: "meta" });
  const node = element("article", { className: `message ${message.role}` });
  if (message.role === "user") {
    node.append(element("div", { className: "body" }, message.content), meta);
    meta.append(action("edit", "Edit", () => edit(index)));
    return node;
  }
  const body = element("div", { className: "answer" }, ...markdown(message.content));
  if (busy && !message.content) body.classList.add("waiting");
  node.append(body);
  if (message.error) node.append(element("div", { className: "error", role: "alert" }, message.error));
  if (!busy) {
    if (message.facts) meta.append(element("span", { className: "facts" }, message.facts));
    if (message.content) meta.append(action("copy", "Copy", event => copy(message.content, event.currentTarget)));
    if (index === store.current.messages.length - 1) {
      meta.append(action("again", message.error ? "Try again" : "Regenerate", regenerate));
    }
  }
  node.append(meta);
  return node;
}

function action(name, label, onclick) {
  const button = element("button", { type: "button", className: name, onclick }, icon(name), element("span", {}, label));
  return button;
}

// Only the answer that grows is drawn again, at most once a frame.
function showGrowing(message) {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => {
    const body = $("messages").lastElementChild?.querySelector(".answer");
    if (!body || store.current.messages.at(-1) !== message) return;
    body.classList.remove("waiting");
    body.replaceChildren(...markdown(message.content));
    scroll();
  });
}

function showBusy() {
  const busy = running.has(store.current);
  document.body.classList.toggle("busy-now", busy);
  $("send").disabled = !busy && !$("input").value.trim();
  $("send").setAttribute("aria-label", busy ? "Stop" : "Send");
}

function scroll() {
  if (stick) $("messages").scrollTop = $("messages").scrollHeight;
}

function say(text) {
  $("status").textContent = text;
}

// --- asking ---

function sampling() {
  const own = Object.entries(store.settings.sampling).filter(([, value]) => value !== null && value !== "");
  return { ...served?.chat_advice, ...Object.fromEntries(own) };
}

function send(text) {
  if (!text.trim() || running.has(store.current)) return;
  store.current.messages.push({ role: "user", content: text });
  $("input").value = "";
  grow();
  generate();
}

async function generate() {
  const conversation = store.current, controller = new AbortController();
  const message = { role: "assistant", content: "" };
  const asked = conversation.messages.filter(m => m.content).map(({ role, content }) => ({ role, content }));
  if (conversation.system) asked.unshift({ role: "system", content: conversation.system });
  conversation.messages.push(message);
  running.set(conversation, { controller, message });
  store.save(conversation);
  stick = true;
  showAll();
  let saved = Date.now(), pieces = 0, first = null;
  try {
    const result = await answer(asked, sampling(), store.settings.key, controller.signal, piece => {
      message.content += piece;
      pieces += 1;
      first ??= performance.now();
      if (conversation === store.current) showGrowing(message);
      if (Date.now() - saved > 1000) { store.save(conversation); saved = Date.now(); }
    });
    message.facts = facts(result);
    say("Answer finished");
  } catch (error) {
    if (error.name === "AbortError") {
      const seconds = first === null ? 0 : (performance.now() - first) / 1000;
      message.facts = pieces > 1 ? `stopped · ${(pieces / seconds).toFixed(1)} tokens/s` : "stopped";
      say("Stopped");
    } else message.error = error.message;
  } finally {
    running.delete(conversation);
    if (store.conversations.includes(conversation)) store.save(conversation);
    if (conversation === store.current) { showMessages(); showBusy(); }
    showList();
  }
}

function facts({ usage, firstSeconds, decodeSeconds, finish }) {
  if (!usage) return "";
  const { prompt_tokens: prompt, completion_tokens: output } = usage, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${output} ${output === 1 ? "token" : "tokens"}`];
  if (decodeSeconds > 0 && output > 1) parts.push(`${((output - 1) / decodeSeconds).toFixed(1)} tokens/s`);
  if (firstSeconds !== null) parts.push(`first in ${firstSeconds.toFixed(2)} s`);
  parts.push(`${cached} of ${prompt} prompt tokens cached`);
  if (finish === "length") parts.push("cut off");
  return parts.join(" · ");
}

function stop() {
  running.get(store.current)?.controller.abort();
}

function regenerate() {
  const { messages } = store.current;
  if (running.has(store.current)) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  if (messages.length) generate();
}

function edit(index) {
  stop();
  const [message] = store.current.messages.splice(index);
  $("input").value = message.content;
  store.save();
  showAll();
  grow();
  $("input").focus();
}

async function copy(text, button) {
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

// --- page ---

function newChat() {
  store.start();
  showAll();
  closeSidebar();
  $("input").focus();
}

function openSidebar() {
  document.body.classList.add("sidebar-open");
  $("scrim").hidden = false;
  $("close-sidebar").focus();
}

function closeSidebar() {
  document.body.classList.remove("sidebar-open");
  $("scrim").hidden = true;
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  showBusy();
}

const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const { theme } = store.settings;
  document.documentElement.dataset.theme = theme === "auto" ? (darkSystem.matches ? "dark" : "light") : theme;
  $("theme").replaceChildren(icon(theme in THEMES ? theme : "auto"));
  $("theme").setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
  $("theme").title = `Theme: ${THEMES[theme]}`;
}

function nextTheme() {
  const names = Object.keys(THEMES);
  store.settings.theme = names[(names.indexOf(store.settings.theme) + 1) % names.length];
  store.saveSettings();
  applyTheme();
}

function buildSettings() {
  for (const field of FIELDS) {
    const input = element("input", { id: `set-${field.name}`, type: "number", min: field.min, max: field.max, step: field.step,
                                     placeholder: field.hint, inputMode: field.step === 1 ? "numeric" : "decimal" });
    $("sampling").append(element("label", {}, field.label, input));
  }
}

function openSettings() {
  $("set-system").value = store.current.system;
  $("set-key").value = store.settings.key;
  for (const { name, hint } of FIELDS) {
    $(`set-${name}`).value = store.settings.sampling[name] ?? "";
    $(`set-${name}`).placeholder = served?.chat_advice[name] ?? served?.default_sampling[name] ?? hint;
  }
  $("settings").showModal();
}

function saveSettings() {
  const key = store.settings.key;
  store.current.system = $("set-system").value.trim();
  store.settings.key = $("set-key").value.trim();
  store.settings.sampling = Object.fromEntries(FIELDS.map(({ name }) => [name, $(`set-${name}`)])
    .filter(([, input]) => input.value !== "" && input.validity.valid).map(([name, input]) => [name, input.valueAsNumber]));
  store.saveSettings();
  store.save();
  showMessages();
  if (key !== store.settings.key) findModel();
}

async function findModel() {
  try {
    served = await askModel(store.settings.key);
    $("model").textContent = served.id;
    $("model").title = `${served.id}, context of ${served.max_model_len} tokens`;
    $("input").disabled = served.chat === false;
    if (served.chat === false && !store.current.messages.length) showMessages();
  } catch (error) {
    $("model").textContent = error.message;
  }
}

function onKey(event) {
  if (event.key === "Escape" && !$("settings").open) {
    if (document.body.classList.contains("sidebar-open")) closeSidebar(); else stop();
  } else if (event.altKey && event.code === "KeyN") { event.preventDefault(); newChat(); }
  else if (event.altKey && event.code === "KeyS") { event.preventDefault(); openSettings(); }
  else if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); $("input").focus(); }
}

function listen() {
  $("composer").onsubmit = event => {
    event.preventDefault();
    if (running.has(store.current)) stop(); else send($("input").value);
  };
  $("input").oninput = grow;
  $("input").onkeydown = event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send($("input").value);
  };
  $("messages").onscroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = $("messages");
    stick = scrollHeight - scrollTop - clientHeight < 60;
    $("to-end").hidden = stick;
  };
  $("messages").onclick = event => {
    const button = event.target.closest(".copy-code");
    if (button) copy(button.closest("figure").querySelector("code").textContent, button);
  };
  $("to-end").onclick = () => { stick = true; scroll(); };
  $("new-chat").onclick = newChat;
  $("open-sidebar").onclick = openSidebar;
  $("close-sidebar").onclick = closeSidebar;
  $("scrim").onclick = closeSidebar;
  $("theme").onclick = nextTheme;
  $("open-settings").onclick = openSettings;
  $("settings").onclose = saveSettings;
  $("settings").onclick = event => { if (event.target === $("settings")) $("settings").close(); };
  $("reset-settings").onclick = () => {
    for (const input of $("settings").querySelectorAll("fieldset input, #set-system")) input.value = "";
  };
  addEventListener("keydown", onKey);
  addEventListener("pagehide", () => running.forEach((_, conversation) => store.save(conversation)));
  darkSystem.addEventListener("change", applyTheme);
}

buildSettings();
listen();
applyTheme();
showAll();
grow();
findModel();
$("input").focus();
