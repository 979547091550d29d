// The dialog of settings: its fields, filled from what is kept and read back into it.

import { $, element } from "./dom.js";

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

export function buildSettings() {
  for (const field of FIELDS) {
    const input = element("input", { id: `set-${field.name}`, type: "number", min: field.min, max: field.max, step: field.step,
                                     placeholder: field.hint, inputMode: field.step === 1 ? "numeric" : "decimal" });
    $("sampling").append(element("label", {}, field.label, input));
  }
}

// `served`: what the server says of its model, for the hints of empty fields; null before it has answered.
export function openSettings(store, served) {
  $("set-system").value = store.current.system;
  $("set-key").value = store.settings.key;
  for (const { name, hint } of FIELDS) {
    $(`set-${name}`).value = store.settings.sampling[name] ?? "";
    $(`set-${name}`).placeholder = served?.chat_advice[name] ?? served?.default_sampling[name] ?? hint;
  }
  $("settings").showModal();
}

export function readSettings(store) {
  store.current.system = $("set-system").value.trim();
  store.settings.key = $("set-key").value.trim();
  store.settings.sampling = Object.fromEntries(FIELDS.map(({ name }) => [name, $(`set-${name}`)])
    .filter(([, input]) => input.value !== "" && input.validity.valid).map(([name, input]) => [name, input.valueAsNumber]));
  store.saveSettings();
  store.save();
}

export function clearFields() {
  for (const input of $("settings").querySelectorAll("fieldset input, #set-system")) input.value = "";
}
