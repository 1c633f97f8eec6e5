// The messages that are shown, and the scroll that follows a stream unless whoever reads has scrolled away from it.

import { hideAlternatives } from "./alternatives.js";
import { path, siblings } from "./conversation.js";
import { byId } from "./dom.js";
import { messageView } from "./message.js";

const NEAR = 60;

/** The list of messages: `{show(conversation, runningId), refresh(node), view(node)}`. */
export function thread(act) {
  const list = byId("messages");
  const scroller = byId("thread");
  const latest = byId("latest");
  let views = new Map();
  let current = null;
  let follows = true;

  scroller.addEventListener("scroll", () => {
    follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    latest.hidden = follows;
  });
  latest.addEventListener("click", () => toEnd());

  return { show, refresh, view: (node) => views.get(node.id), toEnd };

  /** Shows the path of a conversation; the answer with the id `running` is still being written. */
  function show(conversation, running) {
    hideAlternatives();
    if (current !== conversation) views = new Map();
    current = conversation;
    const nodes = path(conversation);
    const kept = new Map(nodes.map((node) => [node.id, views.get(node.id) ?? messageView(node, act)]));
    views = kept;
    for (const node of nodes) kept.get(node.id).update(siblings(conversation, node), node.id === running);
    const elements = nodes.map((node) => kept.get(node.id).element);
    // What stands in its place is not moved: moving takes the focus away.
    for (const element of [...list.children]) if (!elements.includes(element)) element.remove();
    elements.forEach((element, at) => {
      if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
    });
    document.body.classList.toggle("is-empty", nodes.length === 0);
    if (follows) toEnd();
  }

  /** Shows what came to one answer. */
  function refresh(conversation, node, running) {
    views.get(node.id)?.update(siblings(conversation, node), running);
    if (follows) toEnd();
  }

  function toEnd() {
    follows = true;
    latest.hidden = true;
    scroller.scrollTop = scroller.scrollHeight;
  }
}
