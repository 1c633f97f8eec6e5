// Answers that are being generated, at most one for each conversation. Generation continues while another conversation
// is visible. The page is updated once for each frame, and the conversation is saved once a second.

import { announce } from "./announce.js";
import { append } from "./conversation.js";
import { generate } from "./generation.js";
import { clearNotice } from "./notice.js";

const SAVE_INTERVAL_MILLISECONDS = 1000;
const MAX_ANNOUNCED_CHARACTERS = 2000;

/**
 * Creates `{start(…), stop(id), get(id), conversations()}`, where `id` is that of a conversation.
 *
 * `handlers` has `onStart`, `onProgress` and `onEnd`, called with a conversation and its answer, `save`, called with a
 * conversation, and `refreshModel(id)`, which resolves to the server's current description of a model.
 */
export function createAnswers(handlers) {
  const running = new Map();
  const conversations = () => [...running.values()].map(({ conversation }) => conversation);
  const get = (id) => running.get(id) ?? null;
  return { start, stop, get, conversations };

  /**
   * Adds an answer of a model below `parent` and generates it; `prefix` has the text and the tokens that it begins with.
   *
   * An answer that is still being generated in this conversation is stopped.
   */
  async function start(conversation, parent, model, prefix = { content: "", tokens: [], reasoning: "" }) {
    const started = { finishReason: null, error: null, statistics: null, contextStart: null };
    const fields = { role: "assistant", model: model.id, ...started, ...prefix };
    const answer = append(conversation, parent, fields);
    const controller = new AbortController();
    stop(conversation.id);
    running.set(conversation.id, { conversation, answer, controller });
    announce("Generating an answer");
    for (const topic of ["files", "server"]) clearNotice(topic);
    handlers.onStart(conversation, answer);
    let frame = null;
    let savedAt = Date.now();
    const onChange = () => {
      frame ??= requestAnimationFrame(() => {
        frame = null;
        handlers.onProgress(conversation, answer);
      });
      if (Date.now() - savedAt > SAVE_INTERVAL_MILLISECONDS) {
        savedAt = Date.now();
        handlers.save(conversation);
      }
    };
    const { refreshModel } = handlers;
    await generate(conversation, answer, model, controller.signal, { onChange, refreshModel });
    if (frame !== null) cancelAnimationFrame(frame);
    if (get(conversation.id)?.answer === answer) running.delete(conversation.id);
    const text = answer.content.slice(0, MAX_ANNOUNCED_CHARACTERS);
    // Screen readers announce an error themselves, because it has the role "alert".
    if (!answer.error) announce(`${answer.finishReason === "stopped" ? "Stopped" : "Answer"}: ${text}`);
    handlers.onEnd(conversation, answer);
  }

  /** Stops the answer of a conversation. */
  function stop(id) {
    running.get(id)?.controller.abort();
  }
}
