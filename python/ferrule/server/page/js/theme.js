// Light, dark, or as the system has it.

import { announce } from "./announce.js";
import { byId } from "./dom.js";
import { remember } from "./remembered.js";

const KEY = "ferrule-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const WORDS = { auto: "as the system has it", light: "light", dark: "dark" };

/** Makes the button change the theme. */
export function themeSwitch() {
  const button = byId("theme");
  const root = document.documentElement;
  const describe = () => {
    const words = `Colours: ${WORDS[root.dataset.theme]}`;
    button.setAttribute("aria-label", words);
    button.title = words;
    return words;
  };
  button.addEventListener("click", () => {
    root.dataset.theme = NEXT[root.dataset.theme] ?? "auto";
    remember("browser", KEY, root.dataset.theme);
    announce(describe());
  });
  describe();
}
