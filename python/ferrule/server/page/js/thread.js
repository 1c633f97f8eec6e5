// The visible messages. The page scrolls with a stream, unless the user has scrolled away from the end.

import { hideAlternatives } from "./alternatives.js";
import { path, siblings } from "./conversation.js";
import { byId, el } from "./dom.js";
import { createMessageView } from "./message-view.js";

// Number of the last messages that the browser always lays out, so that the end has a known position. The others have a
// class, because a selector that counts from the end is matched again for all messages after each new one.
const LAID_OUT = 12;
// Distance in pixels at which the page counts as scrolled to the end.
const END_DISTANCE = 60;
const TRIMMED = "The messages above are no longer sent to the model, because its context is full.";

/** Creates `{show(conversation, runningId), refresh(conversation, node, isRunning), view(node), scrollToEnd()}`. */
export function createThread(handlers) {
  const list = byId("messages");
  const scroller = byId("thread");
  const endButton = byId("scroll-to-end");
  let views = new Map();
  let current = null;
  let isAtEnd = true;
  const mark = el("p", { class: "trim-mark", role: "note" }, TRIMMED);

  scroller.addEventListener("scroll", () => {
    isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < END_DISTANCE;
    endButton.hidden = isAtEnd;
  });
  endButton.addEventListener("click", () => scrollToEnd());

  return { show, refresh, view: (node) => views.get(node.id), scrollToEnd };

  /** Shows the selected path of a conversation; `runningId` is the id of the answer that is being generated. */
  function show(conversation, runningId) {
    hideAlternatives();
    if (current !== conversation) views = new Map();
    current = conversation;
    const nodes = path(conversation);
    views = new Map(nodes.map((node) => [node.id, views.get(node.id) ?? createMessageView(node, handlers)]));
    const byParent = Map.groupBy(Object.values(conversation.nodes), ({ parent }) => parent);
    for (const node of nodes) views.get(node.id).update(byParent.get(node.parent), node.id === runningId);
    const elements = nodes.map((node) => views.get(node.id).element);
    const lazy = elements.length - LAID_OUT;
    for (const [at, { classList }] of elements.entries()) classList.toggle("lazy-layout", at < lazy);
    mark.remove();
    const shown = new Set(elements);
    for (const element of [...list.children]) if (!shown.has(element)) element.remove();
    // Elements at the right position are not moved, because moving an element removes the focus.
    let next = list.firstElementChild;
    for (const element of elements) {
      if (element === next) next = next.nextElementSibling;
      else list.insertBefore(element, next);
    }
    placeMark(nodes.findLast(({ role }) => role === "assistant"));
    document.body.classList.toggle("is-empty", nodes.length === 0);
    if (isAtEnd) scrollToEnd();
  }

  /** Updates the view of one answer. */
  function refresh(conversation, node, isRunning) {
    views.get(node.id)?.update(siblings(conversation, node), isRunning);
    placeMark(node);
    if (isAtEnd) scrollToEnd();
  }

  /** Places the mark above the first message that was sent for the last answer. */
  function placeMark(answer) {
    const first = views.get(answer?.contextStart)?.element;
    if (!first) mark.remove();
    else if (mark.nextElementSibling !== first) first.before(mark);
  }

  function scrollToEnd() {
    isAtEnd = true;
    endButton.hidden = true;
    scroller.scrollTop = scroller.scrollHeight;
  }
}
