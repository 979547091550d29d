// Markdown that models write, to DOM nodes. Text only ever becomes text nodes, so nothing a model writes can run.

import { element } from "./dom.js";

const FENCE = /^(\s{0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = new RegExp([
  /(?<code>(?<ticks>`+)(?<literal>[^`]|[^`][\s\S]*?[^`])\k<ticks>(?!`))/,
  /(?<strong>\*\*(?=\S)(?<bold>[\s\S]+?\S|\S)\*\*)/,
  /(?<em>(?<![\w*])\*(?=[^\s*])(?<slant>[^*]*[^\s*])\*(?![\w*])|(?<!\w)_(?=[^\s_])(?<under>[^_]*[^\s_])_(?!\w))/,
  /(?<del>~~(?=\S)(?<gone>[\s\S]+?\S|\S)~~)/,
  /(?<link>\[(?<label>[^\]\n]+)\]\((?<href>https?:\/\/[^\s()<>]+)\))/,
  /(?<url>https?:\/\/[^\s<>()"']*[^\s<>()"'.,;:!?])/,
].map(part => part.source).join("|"), "g");

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const g = match.groups;
    if (g.code) nodes.push(element("code", {}, g.literal));
    else if (g.strong) nodes.push(element("strong", {}, ...inline(g.bold)));
    else if (g.em) nodes.push(element("em", {}, ...inline(g.slant ?? g.under)));
    else if (g.del) nodes.push(element("del", {}, ...inline(g.gone)));
    else nodes.push(element("a", { href: g.href ?? g.url, target: "_blank", rel: "noopener noreferrer nofollow" },
                            g.label ?? g.url));
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function code(language, text) {
  const copy = element("button", { type: "button", className: "copy-code" }, "Copy");
  copy.setAttribute("aria-label", "Copy this code");
  return element("figure", {}, element("figcaption", {}, element("span", {}, language || "text"), copy),
                 element("pre", { tabIndex: 0 }, element("code", {}, text)));
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replace(/\\\|/g, "|"));
}

function table(head, rows) {
  const row = (tag, values) => element("tr", {}, ...values.map(value => element(tag, {}, ...inline(value))));
  return element("div", { className: "table" }, element("table", {}, element("thead", {}, row("th", head)),
                                                        element("tbody", {}, ...rows.map(r => row("td", r)))));
}

function listAt(lines, start) {
  const first = ITEM.exec(lines[start]);
  const indent = first[1].length, ordered = /\d/.test(first[2]);
  const list = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2]) !== 1) list.start = parseInt(first[2]);
  let at = start;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== ordered) break;
    const inside = [item[3]], width = lines[at].length - item[3].length;
    for (at += 1; at < lines.length; at += 1) {
      const line = lines[at], depth = line.search(/\S/);
      const next = lines.slice(at).find(other => other.trim());
      if (depth < 0) {
        if (!next || next.search(/\S/) <= indent && !ITEM.test(next)) break;
        inside.push("");
      } else if (depth > indent) inside.push(line.slice(Math.min(depth, width)));
      else break;
    }
    while (inside.length && !inside.at(-1).trim()) inside.pop();
    const content = blocks(inside);
    // An item of one paragraph stays on its line.
    if (content.length && content[0].tagName === "P") content.splice(0, 1, ...content[0].childNodes);
    list.append(element("li", {}, ...content));
  }
  return [list, at];
}

function blocks(lines) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (!line.trim()) { at += 1; }
    else if (fence) {
      const inside = [], closing = new RegExp(`^\\s{0,3}${fence[2][0]}{${fence[2].length},}\\s*$`);
      for (at += 1; at < lines.length && !closing.test(lines[at]); at += 1) {
        inside.push(lines[at].startsWith(fence[1]) ? lines[at].slice(fence[1].length) : lines[at]);
      }
      at += 1;
      nodes.push(code(fence[3].trim().split(/\s/)[0], inside.join("\n")));
    } else if (heading) {
      nodes.push(element(`h${Math.min(heading[1].length + 1, 5)}`, {}, ...inline(heading[2])));
      at += 1;
    } else if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      nodes.push(element("hr"));
      at += 1;
    } else if (/^\s{0,3}>/.test(line)) {
      const inside = [];
      for (; at < lines.length && /^\s{0,3}>/.test(lines[at]); at += 1) inside.push(lines[at].replace(/^\s{0,3}> ?/, ""));
      nodes.push(element("blockquote", {}, ...blocks(inside)));
    } else if (ITEM.test(line)) {
      const [list, next] = listAt(lines, at);
      nodes.push(list);
      at = next;
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/.test(lines[at + 1] ?? "")) {
      const rows = [];
      const head = cells(line);
      for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) rows.push(cells(lines[at]));
      nodes.push(table(head, rows));
    } else {
      const inside = [];
      for (; at < lines.length && lines[at].trim(); at += 1) {
        if (inside.length && (FENCE.test(lines[at]) || ITEM.test(lines[at]) || /^\s{0,3}(#{1,6}\s|>)/.test(lines[at]))) break;
        inside.push(lines[at]);
      }
      nodes.push(element("p", {}, ...inline(inside.join("\n").trim())));
    }
  }
  return nodes;
}

export function markdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"));
}
