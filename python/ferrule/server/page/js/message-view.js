// The view of one message. Its element exists as long as the message is visible, so that the focus, a selection and
// expanded reasoning survive updates.

import { showOnHover } from "./alternatives.js";
import { attachmentChips } from "./attachment-view.js";
import { certaintyLegend } from "./certainty.js";
import { copyButton } from "./clipboard.js";
import { otherVersion, sideLabel } from "./comparison.js";
import { el } from "./dom.js";
import { createEditor } from "./editor.js";
import { button } from "./icons.js";
import { renderMarkdown } from "./markdown.js";
import { statisticElements } from "./statistics.js";
import { createTokenList } from "./token-list.js";
import { locateTokens, tokenOffset } from "./tokens.js";

/**
 * Creates the view of a node: `{element, update(siblings, isRunning), edit(), compare(other)}`.
 *
 * `handlers` has `edit(node, text)`, `resend(node)`, `regenerate(node)`, `continueAnswer(node)`,
 * `selectVersion(node, action)` and `continueFromToken(node, index, text)`.
 */
export function createMessageView(node, handlers) {
  const isAnswer = node.role === "assistant";
  const body = el("div", { class: isAnswer ? "body prose" : "body user-text" });
  const side = el("div", {}, body);
  const sides = el("div", { class: "sides" }, side);
  const reasoning = el("div", { class: "reasoning" });
  const attachments = node.attachments?.length > 0 ? attachmentChips(node.attachments) : null;
  const legend = isAnswer ? certaintyLegend() : null;
  const actions = el("div", { class: "actions", role: "group", "aria-label": isAnswer ? "Answer" : "Message" });
  const author = el("h2", { id: `author-${node.id}`, class: "author" }, isAnswer ? (node.model ?? "Answer") : "You");
  const element = el(
    "article",
    { class: `message ${node.role}`, "aria-labelledby": author.id, "data-node": node.id },
    author,
    el("div", { class: "column" }, isAnswer ? reasoning : attachments, sides, legend, actions),
  );
  let showsTokens = false;
  let showsCertainty = false;
  let compared = null;
  let isEditing = false;
  let renderedBody = null;
  let renderedActions = "";

  showOnHover(body, ({ dataset }) => [node.tokens[dataset.token], selectHandler(Number(dataset.token))]);

  return { element, update, edit, compare };

  function update(siblings, isRunning) {
    showComparison(siblings);
    if (isRunning !== element.classList.contains("running")) {
      element.setAttribute("aria-busy", String(isRunning));
      element.classList.toggle("running", isRunning);
    }
    if (!isEditing && !showsTokens) showBody();
    if (isAnswer) showReasoning(isRunning);
    showActions(siblings, isRunning);
  }

  function showBody() {
    const state = `${node.tokens?.length ?? 0} ${node.content}`;
    if (state === renderedBody) return;
    renderedBody = state;
    if (isAnswer) renderMarkdown(body, node.content, locateTokens(node.tokens, node.content));
    else body.textContent = node.content;
    // A message may have only attachments.
    body.hidden = !isAnswer && node.content === "";
  }

  /** Shows another version beside this one from the next update on; null shows this version alone. */
  function compare(other) {
    compared = other;
  }

  function showComparison(siblings) {
    const at = siblings.findIndex(({ id }) => id === compared?.id);
    const name = (index) => `Version ${index + 1} of ${siblings.length}`;
    const state = at < 0 ? "" : `${siblings[at].content.length} ${name(at)}`;
    if (state === (sides.dataset.state ?? "")) return;
    sides.dataset.state = state;
    sides.classList.toggle("comparing", at >= 0);
    if (at < 0) {
      side.replaceChildren(body);
      sides.replaceChildren(side);
    } else {
      side.replaceChildren(sideLabel(name(siblings.findIndex(({ id }) => id === node.id))), body);
      sides.replaceChildren(otherVersion(siblings[at], name(at)), side);
    }
  }

  function restoreBody() {
    renderedBody = null;
    body.replaceChildren();
    showBody();
  }

  function showReasoning(isRunning) {
    if (!node.reasoning) return;
    const text = reasoning.querySelector(".reasoning-text");
    const label = isRunning && node.content === "" ? "Reasoning…" : "Reasoning";
    if (text) {
      text.textContent = node.reasoning;
      reasoning.querySelector("summary").textContent = label;
    } else {
      const content = el("div", { class: "reasoning-text" }, node.reasoning);
      reasoning.append(el("details", {}, el("summary", {}, label), content));
    }
  }

  // The buttons are rebuilt only after a change, so that a focused button is not removed.
  function showActions(siblings, isRunning) {
    const versions = siblings.map(({ id }) => id);
    const shown = [showsTokens, showsCertainty, compared?.id, isEditing];
    const state = JSON.stringify([versions, isRunning, node.finishReason, node.error, ...shown]);
    const statistics = () => (isAnswer ? statisticElements(node) : []);
    if (state === renderedActions) {
      // Only the statistics of a running answer change, so that a long conversation is updated quickly.
      if (isRunning) actions.querySelector(".statistics")?.replaceChildren(...statistics());
      return;
    }
    renderedActions = state;
    const focused = actions.contains(document.activeElement) ? document.activeElement.dataset.action : null;
    actions.hidden = isEditing;
    actions.replaceChildren(
      ...versionButtons(siblings),
      ...(isRunning ? [] : messageButtons()),
      el("span", { class: "statistics" }, ...statistics()),
    );
    element.querySelector(".error")?.remove();
    if (node.error) sides.after(errorElement(node.error));
    if (focused) actions.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  function messageButtons() {
    const buttons = [];
    if (node.content !== "") {
      const noun = isAnswer ? "answer" : "message";
      const copy = { iconOnly: true, class: "icon-button", "data-action": "copy" };
      buttons.push(copyButton(`Copy ${noun}`, () => node.content, copy));
      buttons.push(actionButton("edit", "edit", `Edit ${noun}`, edit));
    }
    if (!isAnswer) buttons.push(actionButton("resend", "regenerate", "Resend", () => handlers.resend(node)));
    if (!isAnswer || (node.error && node.content === "")) return buttons;
    buttons.push(actionButton("regenerate", "regenerate", "Regenerate", () => handlers.regenerate(node)));
    if (["length", "stopped"].includes(node.finishReason) && node.content !== "") {
      buttons.push(actionButton("continue", "continue", "Continue", () => handlers.continueAnswer(node)));
    }
    if (node.tokens.length > 0) {
      const pressed = { "aria-pressed": String(showsTokens) };
      buttons.push(actionButton("tokens", "alternatives", "Tokens and alternatives", toggleTokens, pressed));
      const colored = { "aria-pressed": String(showsCertainty) };
      buttons.push(actionButton("certainty", "certainty", "Color by certainty", toggleCertainty, colored));
    }
    return buttons;
  }

  function versionButtons(siblings) {
    if (siblings.length < 2) return [];
    const at = siblings.findIndex(({ id }) => id === node.id);
    const select = (action, label, to) =>
      actionButton(action, action, label, () => handlers.selectVersion(siblings[to], action), {
        disabled: !siblings[to],
      });
    return [
      el(
        "span",
        { class: "versions", role: "group", "aria-label": `Version ${at + 1} of ${siblings.length}` },
        select("previous", "Previous version", at - 1),
        el("span", { class: "version" }, `${at + 1}/${siblings.length}`),
        select("next", "Next version", at + 1),
        isAnswer ? compareButton(siblings, at) : null,
      ),
    ];
  }

  function compareButton(siblings, at) {
    const toggle = () => {
      compare(compared ? null : (siblings[at - 1] ?? siblings[at + 1]));
      update(siblings, element.classList.contains("running"));
    };
    const pressed = { "aria-pressed": String(compared !== null) };
    return actionButton("compare", "compare", "Compare versions side by side", toggle, pressed);
  }

  function errorElement({ message, status, retryAfter }) {
    const retry = button("regenerate", "Try again", () => handlers.regenerate(node), { class: "plain-button" });
    const code = status ? `${status}: ` : "";
    const wait = retryAfter ? ` Try again in ${retryAfter} s.` : "";
    return el("div", { class: "error", role: "alert" }, el("p", {}, `${code}${message}${wait}`), retry);
  }

  // An answer cannot continue from a token while it is generated, or from a token outside of its text.
  function selectHandler(index) {
    if (element.classList.contains("running") || tokenOffset(node.tokens, node.content, index) < 0) return null;
    return (text) => handlers.continueFromToken(node, index, text);
  }

  function toggleCertainty() {
    showsCertainty = !showsCertainty;
    element.classList.toggle("certainty", showsCertainty);
    actions.querySelector("[data-action=certainty]").setAttribute("aria-pressed", String(showsCertainty));
  }

  function toggleTokens() {
    showsTokens = !showsTokens;
    if (showsTokens) {
      body.replaceChildren(createTokenList(node.tokens, selectHandler));
      body.querySelector("[tabindex='0']")?.focus();
    } else {
      restoreBody();
    }
    actions.querySelector("[data-action=tokens]").setAttribute("aria-pressed", String(showsTokens));
  }

  function edit() {
    const close = () => {
      isEditing = false;
      restoreBody();
      actions.hidden = false;
      actions.querySelector("[data-action=edit]")?.focus();
    };
    const { form, focus } = createEditor({
      text: node.content,
      label: isAnswer ? "Edit answer" : "Edit message",
      saveLabel: isAnswer ? "Save as new version" : "Send",
      save: (text) => {
        close();
        handlers.edit(node, text);
      },
      cancel: close,
    });
    isEditing = true;
    showsTokens = false;
    actions.hidden = true;
    body.hidden = false;
    body.replaceChildren(form);
    focus();
  }
}

function actionButton(action, iconName, label, click, attributes = {}) {
  const common = { iconOnly: true, class: "icon-button", "data-action": action };
  return button(iconName, label, click, { ...common, ...attributes });
}
