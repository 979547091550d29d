// Conversations and settings in the browser's localStorage. Nothing leaves the browser except in requests to the server.

const CONVERSATIONS = "relaxpack.conversations", SETTINGS = "relaxpack.settings", CURRENT = "relaxpack.current";

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;       // storage is full or forbidden: the page still works, it only forgets
  }
}

export class Store {
  constructor() {
    const stored = read(CONVERSATIONS, []);
    this.conversations = Array.isArray(stored) ? stored.filter(c => c && Array.isArray(c.messages)) : [];
    this.settings = { sampling: {}, key: "", theme: "auto", ...read(SETTINGS, {}) };
    const current = read(CURRENT, null);
    this.current = this.conversations.find(c => c.id === current) ?? this.start();
  }

  // A conversation nobody wrote in yet is not listed and not kept.
  start() {
    this.current = { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", system: "", messages: [] };
    write(CURRENT, this.current.id);
    return this.current;
  }

  open(conversation) {
    this.current = conversation;
    write(CURRENT, conversation.id);
  }

  save(conversation = this.current) {
    if (conversation.messages.length && !this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    if (!conversation.title) conversation.title = title(conversation);
    while (!write(CONVERSATIONS, this.conversations) && this.conversations.length > 1) this.conversations.pop();
    write(CURRENT, this.current.id);
  }

  remove(conversation) {
    this.conversations = this.conversations.filter(c => c !== conversation);
    write(CONVERSATIONS, this.conversations);
    if (this.current === conversation) this.start();
  }

  saveSettings() {
    write(SETTINGS, this.settings);
  }
}

function title(conversation) {
  const first = conversation.messages.find(message => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47)}…` : line;
}
