// The answers that are being written, one for each conversation at most: they go on when another conversation is
// looked at, are drawn once a frame and kept once a second.

import { announce } from "./announce.js";
import { append } from "./conversation.js";
import { generate } from "./generation.js";
import { clearNotice } from "./notice.js";

const KEEP_MILLISECONDS = 1000;
const ANNOUNCED_CHARACTERS = 2000;

/**
 * `{start(…), stop(id), of(id), all()}`, by the ids of conversations.
 *
 * `on` has `begin`, `progress` and `done`, called with a conversation and its answer, and `keep`, with a conversation.
 */
export function answers(on) {
  const running = new Map();
  const all = () => [...running.values()].map((one) => one.conversation);
  const of = (id) => running.get(id) ?? null;
  return { start, stop, of, all };

  /**
   * Adds an answer below `parent` and writes it; `kept` is text and tokens that it begins with.
   *
   * One that is still being written in this conversation ends: what is asked last counts.
   */
  async function start(conversation, parent, model, kept = { content: "", tokens: [], reasoning: "" }) {
    const fields = { role: "assistant", model, finish: null, error: null, figures: null, ...kept };
    const answer = append(conversation, parent, fields);
    const controller = new AbortController();
    stop(conversation.id);
    running.set(conversation.id, { conversation, answer, controller });
    announce("Answering");
    // What went wrong before has been read by now.
    clearNotice();
    on.begin(conversation, answer);
    let drawn = null;
    let keptAt = Date.now();
    const changed = () => {
      drawn ??= requestAnimationFrame(() => {
        drawn = null;
        on.progress(conversation, answer);
      });
      if (Date.now() - keptAt > KEEP_MILLISECONDS) {
        keptAt = Date.now();
        on.keep(conversation);
      }
    };
    await generate(conversation, answer, controller.signal, changed);
    if (drawn !== null) cancelAnimationFrame(drawn);
    if (of(conversation.id)?.answer === answer) running.delete(conversation.id);
    const said = answer.content.slice(0, ANNOUNCED_CHARACTERS);
    // A refusal is an alert and read out as such.
    if (!answer.error) announce(`${answer.finish === "stopped" ? "Stopped" : "Answer"}: ${said}`);
    on.done(conversation, answer);
  }

  /** Ends the answer of a conversation where it is. */
  function stop(id) {
    running.get(id)?.controller.abort();
  }
}
