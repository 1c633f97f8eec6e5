// A conversation as one HTML file without scripts, which needs no server and loads nothing.

import { certaintyLegend } from "./certainty.js";
import { path } from "./conversation.js";
import { el } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { formulasRendered } from "./math.js";
import { locateTokens } from "./tokens.js";

const STYLES = ["colors.css", "controls.css", "messages.css", "prose.css", "certainty.css"];
const OWN_STYLE = `
.shared { max-width: 58rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
.shared > header { margin-bottom: 1rem; border-bottom: 1px solid var(--line); }
.shared > header h1 { margin: 0 0 0.25rem; font: 600 1.5rem/1.3 var(--serif); overflow-wrap: anywhere; }
.shared > header p { margin: 0 0 0.75rem; color: var(--text-muted); }
.shared input { width: auto; }
.shared .attachment-names { flex-basis: 100%; margin: 0 0 0.25rem; color: var(--text-muted); overflow-wrap: anywhere; }
.shared .certainty-legend { display: none; }
.shared:has(#certainty:checked) .certainty-legend { display: flex; }
`;
// Selects the rules of certainty.css for the tokens, which the check box switches.
const TOKEN_RULE = /^\.certainty (?=\[|:is)/gm;
const CHECKED = ".shared:has(#certainty:checked) ";
const POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };

/** Returns the text of a HTML file with the visible messages of a conversation. */
export async function sharedPage(conversation) {
  const nodes = path(conversation);
  const articles = nodes.map(article);
  await formulasRendered();
  for (const made of articles) removeControls(made);
  const body = el("main", { class: "shared" }, header(conversation, nodes), ...articles);
  const title = escape(conversation.title || "Conversation");
  return [
    '<!doctype html>\n<html lang="en" data-theme="auto">\n<head>\n<meta charset="utf-8">',
    `<meta http-equiv="Content-Security-Policy" content="${POLICY}">`,
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    '<meta name="referrer" content="no-referrer">',
    `<title>${title}</title>`,
    `<style>\n${await styles()}\n</style>\n</head>`,
    // The serialized elements are HTML, too, because none of them is a script, a style or empty.
    `<body>\n${new XMLSerializer().serializeToString(body)}\n</body>\n</html>\n`,
  ].join("\n");
}

async function styles() {
  const texts = STYLES.map(async (name) => (await fetch(new URL(`../css/${name}`, import.meta.url))).text());
  const joined = [...(await Promise.all(texts)), OWN_STYLE].join("\n");
  return joined.replaceAll(TOKEN_RULE, CHECKED);
}

function header({ title, created }, nodes) {
  const models = [...new Set(nodes.map(({ model }) => model).filter(Boolean))];
  const date = new Date(created).toISOString().slice(0, 10);
  const hasTokens = nodes.some(({ tokens }) => tokens?.length > 0);
  const label = el("label", {}, el("input", { type: "checkbox", id: "certainty" }), " Color by certainty");
  return el(
    "header",
    {},
    el("h1", {}, title || "Conversation"),
    el("p", {}, [date, ...models, "ferrule"].join(" · ")),
    hasTokens ? el("p", {}, label) : null,
    hasTokens ? certaintyLegend() : null,
  );
}

function article(node) {
  const isAnswer = node.role === "assistant";
  const text = el("div", { class: isAnswer ? "body prose" : "body user-text" });
  if (isAnswer) renderMarkdown(text, node.content, locateTokens(node.tokens, node.content));
  else text.append(node.content);
  const author = el("h2", { class: "author" }, isAnswer ? (node.model ?? "Answer") : "You");
  const parts = node.content === "" && node.attachments?.length ? [] : [text];
  const column = el("div", { class: "column" }, attachmentNames(node.attachments ?? []), ...parts);
  return el("article", { class: `message ${node.role} lazy-layout` }, author, column);
}

// The texts of attachments can be long and private.
function attachmentNames(attachments) {
  if (attachments.length === 0) return null;
  const names = attachments.map(({ name }) => name).join(", ");
  return el("p", { class: "attachment-names" }, `${attachments.length > 1 ? "Attachments" : "Attachment"}: ${names}`);
}

function removeControls(article) {
  for (const button of article.querySelectorAll("button")) button.remove();
  for (const token of article.querySelectorAll(".token")) token.removeAttribute("data-token");
  // Browsers typeset MathML, and the file has no fonts for the elements of KaTeX.
  for (const formula of article.querySelectorAll(".katex")) {
    const math = formula.querySelector("math");
    math.querySelector("annotation")?.remove();
    (formula.closest(".katex-display") ?? formula).replaceWith(math);
  }
}

function escape(text) {
  return text.replaceAll(/[&<>]/g, (character) => ESCAPES[character]);
}
