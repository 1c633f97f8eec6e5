// Markdown rendering. The marked library splits the text into Markdown tokens, and a fixed set of elements is created
// from them, so that there is no HTML to sanitize: HTML in an answer is shown as text. Images are links, so that an
// answer cannot make the browser load anything.

import "../vendor/marked.min.js";
import { cjkEmphasis } from "./cjk-emphasis.js";
import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { MATH_EXTENSIONS, mathBlock, mathSpan } from "./math.js";
import { TokenSpans } from "./token-spans.js";

// The library is not a module; it defines a global object.
const { Lexer } = globalThis.marked;
const EXTENSIONS = { ...MATH_EXTENSIONS, inline: [...MATH_EXTENSIONS.inline, cjkEmphasis] };
const OPTIONS = { gfm: true, breaks: true, pedantic: false, extensions: EXTENSIONS };
const PROTOCOLS = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/;
// Maximum number of * and _ of a paragraph times its characters. marked searches a closing mark for each of them, which
// takes seconds for 20 kB of marks. A long paragraph of ordinary text has a tenth of this.
const EMPHASIS_BUDGET = 2_000_000;
// Number of characters after a block in which an empty line is searched.
const EMPTY_LINE_DISTANCE = 200;
// Finished blocks of each container: {text, count, last}, the text they show, their number, and the last element.
const finished = new WeakMap();

/**
 * Renders Markdown into an element. Finished blocks are kept and not parsed again, so that the time of an update is
 * proportional to the new text, and a selection in a finished block survives.
 *
 * `positions` are those of `locateTokens` in tokens.js.
 */
export function renderMarkdown(container, text, positions) {
  const kept = finishedIn(container, text);
  const spans = new TokenSpans(text, positions, kept.text.length);
  const blocks = lex(text.slice(kept.text.length));
  const elements = blocks.map((block) => spans.within(block.raw, () => blockElement(block, spans)));
  for (const element of [...container.children].slice(kept.count)) element.remove();
  container.append(...elements);
  updateFinished(container, text, kept, blocks);
}

function finishedIn(container, text) {
  const kept = finished.get(container);
  const isValid = kept && text.startsWith(kept.text) && container.children[kept.count - 1] === kept.last;
  return isValid ? kept : { text: "", count: 0, last: undefined };
}

function updateFinished(container, text, kept, blocks) {
  let { count } = kept;
  let end = kept.text.length;
  let at = end;
  // The last two blocks are unfinished: a line of dashes turns the lines above it into a heading.
  for (const [position, { raw }] of blocks.slice(0, -2).entries()) {
    const found = text.indexOf(raw, at);
    // Text between blocks is a link definition, which all later blocks may refer to.
    if (found < 0 || text.slice(at, found).trim() !== "") break;
    at = found + raw.length;
    const next = text.slice(at, at + EMPTY_LINE_DISTANCE);
    if (!/\n[ \t]*\n$/.test(raw) && !/^[ \t]*\n[ \t]*\n/.test(next)) continue;
    end = at;
    count = kept.count + position + 1;
  }
  finished.set(container, { text: text.slice(0, end), count, last: container.children[count - 1] });
}

function lex(text) {
  try {
    // Without a final line end, marked parses an unclosed code block as paragraphs.
    return new BoundedLexer({ ...OPTIONS }).lex(`${text}\n`).filter(isVisible);
  } catch {
    // Blocks that are nested too deeply for the stack are shown as plain text.
    return [{ type: "plain", raw: text }];
  }
}

class BoundedLexer extends Lexer {
  inlineTokens(text, tokens = []) {
    const marks = text.match(/[*_]/g)?.length ?? 0;
    if (marks * text.length <= EMPHASIS_BUDGET) return super.inlineTokens(text, tokens);
    tokens.push({ type: "text", raw: text, text });
    return tokens;
  }
}

function isVisible({ type }) {
  return type !== "space";
}

const BLOCKS = {
  heading: (token, spans) => el(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens, spans)),
  paragraph: (token, spans) => el("p", {}, ...inline(token.tokens, spans)),
  blockquote: (token, spans) => el("blockquote", {}, ...blockElements(token.tokens, spans)),
  code: (token, spans) => codeBlock(token, spans.text(token.text)),
  math: (token, spans) => mathBlock(token, spans.level(token.raw)),
  hr: () => el("hr"),
  list: (token, spans) =>
    el(
      token.ordered ? "ol" : "ul",
      { start: token.ordered && token.start !== 1 ? token.start : null },
      ...token.items.map((item) => spans.within(item.raw, () => listItem(item, spans))),
    ),
  table: (token, spans) =>
    el(
      "div",
      { class: "table", role: "group", tabindex: "0", "aria-label": "Table" },
      el(
        "table",
        {},
        el("thead", {}, row("th", token.header, token.align, spans)),
        el("tbody", {}, ...token.rows.map((cells) => row("td", cells, token.align, spans))),
      ),
    ),
  text: (token, spans) => el("p", {}, ...(token.tokens ? inline(token.tokens, spans) : spans.text(token.raw))),
};

function blockElement(token, spans) {
  const create = BLOCKS[token.type];
  return create ? create(token, spans) : el("p", { class: "plain" }, ...spans.text(token.raw.trimEnd()));
}

function blockElements(tokens, spans) {
  return tokens.filter(isVisible).map((token) => spans.within(token.raw, () => blockElement(token, spans)));
}

function listItem(item, spans) {
  const checkbox = item.task ? el("span", { class: "task" }, item.checked ? "☑ " : "☐ ") : null;
  // Items of a tight list contain text without paragraphs.
  const parts = item.tokens.map((token) => {
    if (token.type === "space") return [];
    if (token.type === "text" && !item.loose) {
      return spans.within(token.raw, () => (token.tokens ? inline(token.tokens, spans) : spans.text(token.raw)));
    }
    return [spans.within(token.raw, () => blockElement(token, spans))];
  });
  return el("li", {}, checkbox, ...parts.flat());
}

function row(tag, cells, align, spans) {
  const cell = ({ tokens }, column) =>
    el(tag, { class: align[column] ? `align-${align[column]}` : null }, ...inline(tokens, spans));
  return el("tr", {}, ...cells.map(cell));
}

const INLINE = {
  strong: (token, spans) => [el("strong", {}, ...inline(token.tokens, spans))],
  em: (token, spans) => [el("em", {}, ...inline(token.tokens, spans))],
  del: (token, spans) => [el("del", {}, ...inline(token.tokens, spans))],
  math: (token, spans) => [mathSpan(token, spans.level(token.raw))],
  br: () => [el("br")],
  codespan: (token, spans) => [el("code", {}, ...spans.text(unescapeHtml(token.text)))],
  escape: (token, spans) => spans.replaced(token.raw, token.raw.slice(1)),
  link: (token, spans) => [link(token.href, inline(token.tokens, spans))],
  image: (token) => [link(token.href, [`Image: ${unescapeHtml(token.text) || unescapeHtml(token.href)}`])],
  html: (token, spans) => (/^<br\s*\/?>$/i.test(token.raw) ? [el("br")] : spans.text(token.raw)),
  text: (token, spans) => (token.tokens ? inline(token.tokens, spans) : plainText(token.raw, spans)),
};

function inline(tokens, spans) {
  return tokens.flatMap((token) =>
    spans.within(token.raw, () => (INLINE[token.type] ?? INLINE.html)(token, spans)),
  );
}

function plainText(raw, spans) {
  const nodes = [];
  let rest = raw;
  for (let match; (match = ENTITY.exec(rest)); rest = rest.slice(match.index + match[0].length)) {
    if (match.index > 0) nodes.push(...spans.text(rest.slice(0, match.index)));
    nodes.push(...spans.replaced(match[0], entityText(match)));
  }
  return rest === "" ? nodes : [...nodes, ...spans.text(rest)];
}

function entityText([, decimal, hexadecimal, name]) {
  if (name) return ENTITIES[name];
  const code = decimal ? Number(decimal) : Number.parseInt(hexadecimal, 16);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\uFFFD";
}

/** Reverts the HTML escapes of marked. */
function unescapeHtml(text) {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => (name === "#39" ? "'" : ENTITIES[name]));
}

function link(href, children) {
  const url = URL.canParse(unescapeHtml(href)) ? new URL(unescapeHtml(href)) : null;
  // The text of a link with another protocol is shown without the link.
  if (!PROTOCOLS.includes(url?.protocol)) return el("span", {}, ...children);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
