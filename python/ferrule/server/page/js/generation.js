// Generation of one answer: writes the streamed text, reasoning, tokens and statistics to the answer's node.

import { countTokens, ServerError, streamChat } from "./api.js";
import { firstMessage } from "./context.js";
import { buildRequest } from "./request.js";
import { TokenReader } from "./tokens.js";

// Interval at which the elapsed time is updated until the first token.
const TIMER_MILLISECONDS = 250;
// Browsers deliver buffered chunks at once, so the rate of shorter intervals is meaningless.
const MIN_MEASURED_MILLISECONDS = 20;

/**
 * Fills `answer` until it ends, fails, or `signal` aborts; calls `onChange` after each chunk. `refreshModel(id)` resolves to
 * the server's current description of a model.
 *
 * `finishReason` is that of the server, "loop" if the server stopped an endless loop, "stopped" if the user stopped the
 * answer, or "error" if `error` is set.
 */
export async function generate(conversation, answer, listedModel, signal, { onChange, refreshModel }) {
  const reader = new TokenReader();
  const start = performance.now();
  const prefixTokens = answer.tokens.length;
  answer.statistics = { milliseconds: 0 };
  const timer = setInterval(() => {
    if (answer.statistics.firstToken === undefined) {
      answer.statistics.elapsed = performance.now() - start;
      onChange();
    }
  }, TIMER_MILLISECONDS);
  try {
    const model = await loadedModel(conversation, answer, listedModel, signal, refreshModel);
    answer.contextStart = await firstMessage(conversation, answer, model, signal);
    const request = buildRequest(conversation, answer, model.answer_defaults);
    for await (const chunk of streamChat(request, signal)) {
      addChunk(answer, chunk, reader);
      updateStatistics(answer, chunk, performance.now() - start, prefixTokens);
      onChange();
    }
    answer.finishReason ??= "stop";
  } catch (error) {
    if (error.name === "AbortError") {
      answer.finishReason = "stopped";
    } else {
      answer.finishReason = "error";
      const { message, status = null, param = null, retryAfter = null } = error;
      answer.error = { message, status, param, retryAfter };
    }
  } finally {
    clearInterval(timer);
  }
  conversation.updated = Date.now();
}

// A model that is loaded on demand has a limit and defaults only when it is loaded.
async function loadedModel(conversation, answer, model, signal, refreshModel) {
  if (model.max_model_len) return model;
  try {
    await countTokens(buildRequest(conversation, answer, model.answer_defaults), signal);
  } catch (error) {
    // The request for the answer has the same error, unless the server has a fallback.
    if (!(error instanceof ServerError)) throw error;
  }
  return (await refreshModel(model.id)) ?? model;
}

function addChunk(answer, { choices }, reader) {
  const choice = choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning = choice.delta?.reasoning } = choice.delta ?? {};
  if (reasoning) answer.reasoning += reasoning;
  if (content) answer.content += content;
  // Tokens of the reasoning are not saved, because only tokens of the answer have visible alternatives.
  for (const entry of choice.logprobs?.content ?? []) {
    const token = reader.read(entry);
    if (!reasoning) answer.tokens.push(token);
  }
  if (choice.finish_reason) answer.finishReason = choice.stop_reason === "loop" ? "loop" : choice.finish_reason;
}

function updateStatistics(answer, { usage, choices }, milliseconds, prefixTokens) {
  const { statistics } = answer;
  const delta = choices?.[0]?.delta ?? {};
  if (delta.content || delta.reasoning_content || delta.reasoning) {
    statistics.firstToken ??= milliseconds;
    statistics.chunks = (statistics.chunks ?? 0) + 1;
    statistics.milliseconds = milliseconds;
  }
  // The number of chunks approximates the number of tokens until the server reports it.
  statistics.completionTokens = Math.max(answer.tokens.length - prefixTokens, statistics.chunks ?? 0);
  if (usage) {
    statistics.promptTokens = usage.prompt_tokens;
    statistics.completionTokens = usage.completion_tokens;
    statistics.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? null;
  }
}

/** Returns the decode rate in tokens per second, without the first token; null if there is too little data. */
export function tokensPerSecond({ firstToken, milliseconds, completionTokens }) {
  const decode = milliseconds - firstToken;
  return decode >= MIN_MEASURED_MILLISECONDS && completionTokens > 1 ? ((completionTokens - 1) / decode) * 1000 : null;
}

/** Returns the number of context tokens of an answer and its prompt; null until the server reports it. */
export function contextTokens({ promptTokens, completionTokens }) {
  return promptTokens === undefined ? null : promptTokens + completionTokens;
}
