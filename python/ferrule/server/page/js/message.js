// A message on the page. Its element lives as long as the message is shown, so that the focus, a selection and an open
// fold survive what happens around it.

import { hideSoon, showSoon } from "./alternatives.js";
import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { editor } from "./editor.js";
import { figureList } from "./figures.js";
import { button } from "./icons.js";
import { renderMarkdown } from "./markdown.js";
import { offsetOf, place } from "./tokens.js";
import { tokenWalk } from "./tokenwalk.js";

/**
 * The view of a node: `{element, update(siblings, running), edit()}`.
 *
 * `act` has what can be done: `edit(node, text)`, `regenerate(node)`, `goOn(node)`, `choose(node)`,
 * `branch(node, index, text)`.
 */
export function messageView(node, act) {
  const isAnswer = node.role === "assistant";
  const body = el("div", { class: isAnswer ? "body prose" : "body said" });
  const before = el("div", { class: "reasoning-place" });
  const actions = el("div", { class: "actions", role: "group", "aria-label": isAnswer ? "Answer" : "Message" });
  const heading = el("h2", { id: `who-${node.id}`, class: "who" }, isAnswer ? (node.model ?? "Answer") : "You");
  const element = el(
    "article",
    { class: `message ${node.role}`, "aria-labelledby": heading.id, "data-node": node.id },
    heading,
    el("div", { class: "column" }, isAnswer ? before : null, body, actions),
  );
  let walking = false;
  let editing = false;
  let shown = "";
  let drawn = null;

  body.addEventListener("pointerover", ({ target }) => {
    const token = target.closest(".token:not(.walked)");
    if (token) showSoon(token, node.tokens[token.dataset.token], branching(Number(token.dataset.token)));
  });
  // A finger that is lifted leaves, too; its card stays until the next touch.
  body.addEventListener("pointerout", ({ pointerType }) => pointerType === "mouse" && hideSoon());

  return { element, update, edit };

  function update(siblings, running) {
    element.setAttribute("aria-busy", String(running));
    element.classList.toggle("running", running);
    if (!editing && !walking) showBody();
    if (isAnswer) showReasoning(running);
    showActions(siblings, running);
  }

  function showBody() {
    const now = `${node.tokens?.length ?? 0} ${node.content}`;
    if (now === drawn) return;
    drawn = now;
    if (isAnswer) renderMarkdown(body, node.content, place(node.tokens, node.content));
    else body.textContent = node.content;
  }

  function restoreBody() {
    drawn = null;
    body.replaceChildren();
    showBody();
  }

  function showReasoning(running) {
    if (!node.reasoning) return before.replaceChildren();
    const text = before.querySelector(".reasoning-text");
    const words = running && node.content === "" ? "Reasoning…" : "Reasoning";
    if (text) {
      text.textContent = node.reasoning;
      before.querySelector("summary").textContent = words;
    } else {
      const fold = el("div", { class: "reasoning-text" }, node.reasoning);
      before.append(el("details", {}, el("summary", {}, words), fold));
    }
  }

  // Rebuilt only after a change, so that a focused button is not removed.
  function showActions(siblings, running) {
    const versions = siblings.map(({ id }) => id);
    const state = JSON.stringify([versions, running, node.finish, node.error, walking, editing]);
    const figures = isAnswer ? figureList(node) : [];
    if (state === shown) return actions.querySelector(".figures")?.replaceChildren(...figures);
    shown = state;
    const focused = actions.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    actions.hidden = editing;
    actions.replaceChildren(
      ...branchButtons(siblings),
      ...(running ? [] : buttons()),
      el("span", { class: "figures" }, ...figures),
    );
    element.querySelector(".refusal")?.remove();
    if (node.error) body.after(refusal(node.error));
    if (focused) actions.querySelector(`[data-act="${focused}"]`)?.focus();
  }

  function buttons() {
    const quiet = { quiet: true, class: "icon-button" };
    const made = [];
    if (node.content !== "") {
      const words = isAnswer ? "answer" : "message";
      made.push(copyButton(`Copy ${words}`, () => node.content, { ...quiet, "data-act": "copy" }));
      made.push(button("edit", `Edit ${words}`, edit, { ...quiet, "data-act": "edit" }));
    }
    if (!isAnswer) return made;
    if (node.error && node.content === "") return made;
    made.push(button("regenerate", "Regenerate", () => act.regenerate(node), { ...quiet, "data-act": "regenerate" }));
    if (["length", "stopped"].includes(node.finish) && node.content !== "") {
      made.push(button("more", "Go on", () => act.goOn(node), { ...quiet, "data-act": "more" }));
    }
    if (node.tokens.length > 0) {
      const pressed = { "aria-pressed": String(walking), "data-act": "tokens" };
      made.push(button("alternatives", "Tokens and their alternatives", toggleWalk, { ...quiet, ...pressed }));
    }
    return made;
  }

  function branchButtons(siblings) {
    if (siblings.length < 2) return [];
    const at = siblings.findIndex(({ id }) => id === node.id);
    const go = (name, label, to) =>
      button(name, label, () => act.choose(siblings[to], name), {
        quiet: true,
        class: "icon-button",
        disabled: !siblings[to],
        "data-act": name,
      });
    return [
      el(
        "span",
        { class: "branches", role: "group", "aria-label": `Version ${at + 1} of ${siblings.length}` },
        go("back", "Version before", at - 1),
        el("span", { class: "branch" }, `${at + 1}/${siblings.length}`),
        go("forward", "Next version", at + 1),
      ),
    ];
  }

  function refusal({ message, status, retryAfter }) {
    const retry = button("regenerate", "Try again", () => act.regenerate(node), { class: "plain-button" });
    const code = status ? `${status}: ` : "";
    const wait = retryAfter ? ` Try again in ${retryAfter} s.` : "";
    return el("div", { class: "refusal", role: "alert" }, el("p", {}, `${code}${message}${wait}`), retry);
  }

  // No branch while the answer is written, or where a token is no part of it.
  function branching(index) {
    if (element.classList.contains("running") || offsetOf(node.tokens, node.content, index) < 0) return null;
    return (text) => act.branch(node, index, text);
  }

  function toggleWalk() {
    walking = !walking;
    if (walking) {
      body.replaceChildren(tokenWalk(node.tokens, branching));
      body.querySelector("[tabindex='0']")?.focus();
    } else {
      restoreBody();
    }
    actions.querySelector("[data-act=tokens]").setAttribute("aria-pressed", String(walking));
  }

  function edit() {
    const done = () => {
      editing = false;
      restoreBody();
      actions.hidden = false;
      actions.querySelector("[data-act=edit]")?.focus();
    };
    const { form, focus } = editor({
      text: node.content,
      label: isAnswer ? "Edit the answer" : "Edit the message",
      action: isAnswer ? "Save as a version" : "Send as a version",
      save: (text) => {
        done();
        act.edit(node, text);
      },
      cancel: done,
    });
    editing = true;
    walking = false;
    actions.hidden = true;
    body.replaceChildren(form);
    focus();
  }
}
