// The theme button: light, dark, or the theme of the system.

import { announce } from "./announce.js";
import { byId } from "./dom.js";
import { writeStorage } from "./storage.js";

const KEY = "ferrule-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const NAMES = { auto: "system", light: "light", dark: "dark" };

/** Makes the button switch the theme. */
export function initTheme() {
  const button = byId("theme");
  const root = document.documentElement;
  const updateLabel = () => {
    const label = `Theme: ${NAMES[root.dataset.theme]}`;
    button.setAttribute("aria-label", label);
    button.title = label;
    return label;
  };
  button.addEventListener("click", () => {
    root.dataset.theme = NEXT[root.dataset.theme] ?? "auto";
    writeStorage("local", KEY, root.dataset.theme);
    announce(updateLabel());
  });
  updateLabel();
}
