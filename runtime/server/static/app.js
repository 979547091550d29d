// The chat page: what happens on clicks and keys. Conversations are in store.js, requests in api.js, looks in messages.js,
// the dialog in settings.js.

import { answer, model as askModel } from "./api.js";
import { $, element, icon } from "./dom.js";
import { markdown } from "./markdown.js";
import { copy, facts, messageNode, welcome } from "./messages.js";
import { buildSettings, clearFields, openSettings, readSettings } from "./settings.js";
import { Store } from "./store.js";
import { applyTheme, followSystem, nextTheme } from "./theme.js";

const store = new Store();
const running = new Map();      // conversation → {controller, message}; an answer goes on while another one is read
let served = null, stick = true, frame = 0;

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
    $("messages").replaceChildren(welcome(served, send));
    return;
  }
  const growing = running.get(store.current)?.message;
  const shown = messages.map((message, index) => messageNode(message, {
    busy: message === growing, last: index === messages.length - 1, edit: () => edit(index), regenerate }));
  if (system) shown.unshift(element("article", { className: "message system" }, element("div", { className: "body" }, system)));
  $("messages").replaceChildren(...shown);
  scroll();
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
  let saved = Date.now(), tokens = 0, first = null;
  try {
    const result = await answer(asked, sampling(), store.settings.key, controller.signal, (piece, soFar) => {
      message.content += piece;
      tokens = soFar;
      first ??= performance.now();
      if (conversation === store.current) showGrowing(message);
      if (Date.now() - saved > 1000) { store.save(conversation); saved = Date.now(); }
    });
    message.facts = facts(result);
    say("Answer finished");
  } catch (error) {
    if (error.name === "AbortError") {
      const seconds = first === null ? 0 : (performance.now() - first) / 1000;
      message.facts = tokens > 1 ? `stopped · ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "stopped";
      say("Stopped");
    } else message.error = error.message;
  } finally {
    running.delete(conversation);
    if (store.conversations.includes(conversation)) store.save(conversation);
    if (conversation === store.current) { showMessages(); showBusy(); }
    showList();
  }
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

function saveSettings() {
  const key = store.settings.key;
  readSettings(store);
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
  else if (event.altKey && event.code === "KeyS") { event.preventDefault(); openSettings(store, served); }
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
  $("theme").onclick = () => { nextTheme(store.settings); store.saveSettings(); };
  $("open-settings").onclick = () => openSettings(store, served);
  $("settings").onclose = saveSettings;
  $("settings").onclick = event => { if (event.target === $("settings")) $("settings").close(); };
  $("reset-settings").onclick = clearFields;
  addEventListener("keydown", onKey);
  addEventListener("pagehide", () => running.forEach((_, conversation) => store.save(conversation)));
  followSystem(store.settings);
}

buildSettings();
listen();
applyTheme(store.settings);
showAll();
grow();
findModel();
$("input").focus();
