// Actions on the messages of the visible conversation: send, edit, generate again, continue, and select versions.

import { append, hasChildren, path, removeNode, select, siblings } from "./conversation.js";
import { showNotice } from "./notice.js";
import { tokenOffset } from "./tokens.js";

/**
 * Creates `{send(text, attachments), handlers, regenerateLast(), editLast(), stepVersion(step)}`; `handlers` are those of the views.
 *
 * `page` has `current()`, the visible conversation, `models`, `answers()`, `thread()` and `composer()`, parts of the
 * page that are created later, and `save(conversation)`, `render()` and `loadModels()`.
 */
export function createMessageActions(page) {
  const { current, models, save, render } = page;
  const handlers = { edit, resend, regenerate, continueAnswer, selectVersion, continueFromToken };
  return { send, handlers, regenerateLast, editLast, stepVersion };

  /** Sends a message; returns whether it was accepted. */
  function send(text, attachments = []) {
    if (!hasModel()) return false;
    const last = path(current()).at(-1) ?? null;
    const message = append(current(), last?.id ?? null, { role: "user", content: text, attachments });
    page.thread().scrollToEnd();
    answer(message.id);
    return true;
  }

  function hasModel() {
    if (models.selected() !== null) return true;
    showNotice("server", "No model is available yet.", page.loadModels);
    return false;
  }

  function answer(parent, prefix) {
    if (!hasModel()) return;
    current().model = models.selected();
    page.answers().start(current(), parent, models.find(current().model), prefix);
  }

  function edit(node, text) {
    if (node.role === "user") {
      const { attachments = [] } = node;
      const message = append(current(), node.parent, { role: "user", content: text, attachments });
      answer(message.id);
    } else {
      const { model, reasoning, contextStart = null } = node;
      const edited = { content: text, tokens: [], statistics: null, finishReason: "stop", error: null };
      append(current(), node.parent, { role: "assistant", model, reasoning, contextStart, ...edited });
      save(current());
    }
    render();
    page.composer().focus();
  }

  function regenerate(node) {
    if (!hasModel()) return;
    if (node.error && node.content === "" && !hasChildren(current(), node)) removeNode(current(), node);
    answer(node.parent);
  }

  /** Generates another answer to a message. */
  function resend(message) {
    answer(message.id);
  }

  function continueAnswer({ parent, content, tokens, reasoning }) {
    answer(parent, { content, tokens: [...tokens], reasoning });
  }

  /** Generates a version of an answer that has `text` in place of a token, and the same text before it. */
  function continueFromToken(node, index, text) {
    const { top } = node.tokens[index];
    const [, logprob] = top.find(([other]) => other === text);
    const content = node.content.slice(0, tokenOffset(node.tokens, node.content, index)) + text;
    const tokens = [...node.tokens.slice(0, index), { text, logprob, top }];
    answer(node.parent, { content, tokens, reasoning: node.reasoning });
    // The fork is shown beside the answer that it comes from.
    page.thread().view(last("assistant"))?.compare(node);
    render();
    page.composer().focus();
  }

  function selectVersion(node, action) {
    show(node);
    const { element } = page.thread().view(node);
    element.querySelector(`[data-action="${action}"]:not(:disabled), [data-action="copy"]`)?.focus();
  }

  function stepVersion(step) {
    const node = path(current()).findLast((visible) => siblings(current(), visible).length > 1);
    const versions = node ? siblings(current(), node) : [];
    const next = versions[versions.indexOf(node) + step];
    if (next) show(next);
  }

  function show(version) {
    select(current(), version);
    save(current());
    render();
  }

  function regenerateLast() {
    const node = last("assistant");
    if (node) regenerate(node);
  }

  function editLast() {
    const node = last("user");
    if (node) page.thread().view(node).edit();
  }

  function last(role) {
    return path(current()).findLast((node) => node.role === role);
  }
}
