// Another version of an answer beside the visible one, such as the continuation from another token.

import { showOnHover } from "./alternatives.js";
import { el } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { locateTokens } from "./tokens.js";

/** Creates the side of another version; `name` is its label, such as "Version 1 of 2". */
export function otherVersion({ content, tokens }, name) {
  const text = el("div", { class: "prose" });
  renderMarkdown(text, content, locateTokens(tokens, content));
  showOnHover(text, ({ dataset }) => [tokens[dataset.token], null]);
  return el("div", { class: "other-version", role: "group", "aria-label": name }, sideLabel(name), text);
}

/** Creates the label above a version. */
export function sideLabel(name) {
  return el("p", { class: "side-label" }, name);
}
