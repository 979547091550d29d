// Light, dark, or as the system has it.

import { $, icon } from "./dom.js";

const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme(settings) {
  const { theme } = settings;
  document.documentElement.dataset.theme = theme === "auto" ? (darkSystem.matches ? "dark" : "light") : theme;
  $("theme").replaceChildren(icon(theme in THEMES ? theme : "auto"));
  $("theme").setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
  $("theme").title = `Theme: ${THEMES[theme]}`;
}

export function nextTheme(settings) {
  const names = Object.keys(THEMES);
  settings.theme = names[(names.indexOf(settings.theme) + 1) % names.length];
  applyTheme(settings);
}

export function followSystem(settings) {
  darkSystem.addEventListener("change", () => applyTheme(settings));
}
