// One answer as it comes: text, reasoning, tokens and figures are written into the node of the conversation.

import { streamChat } from "./api.js";
import { requestFor } from "./request.js";
import { TokenReader } from "./tokens.js";

// How often the time is shown while the prompt is read.
const CLOCK_MILLISECONDS = 250;
// A browser reads what came meanwhile at once: what takes less says nothing of the model.
const MEASURABLE_MILLISECONDS = 20;

/**
 * Fills `answer` until it ends, fails, or `signal` aborts; calls `changed` after each chunk.
 *
 * `finish` is the server's reason, "stopped" when the user ended it, or "error" beside `error`.
 */
export async function generate(conversation, answer, signal, changed) {
  const reader = new TokenReader();
  const asked = performance.now();
  const request = requestFor(conversation, answer);
  const kept = answer.tokens.length;
  answer.figures = { milliseconds: 0 };
  const clock = setInterval(() => {
    if (answer.figures.firstToken === undefined) {
      answer.figures.waited = performance.now() - asked;
      changed();
    }
  }, CLOCK_MILLISECONDS);
  try {
    for await (const chunk of streamChat(request, signal)) {
      take(answer, chunk, reader);
      measure(answer, chunk, performance.now() - asked, kept);
      changed();
    }
    answer.finish ??= "stop";
  } catch (error) {
    if (error.name === "AbortError") {
      answer.finish = "stopped";
    } else {
      answer.finish = "error";
      const { message, status = null, param = null, retryAfter = null } = error;
      answer.error = { message, status, param, retryAfter };
    }
  } finally {
    clearInterval(clock);
  }
  conversation.updated = Date.now();
}

function take(answer, { choices }, reader) {
  const choice = choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning = choice.delta?.reasoning } = choice.delta ?? {};
  if (reasoning) answer.reasoning += reasoning;
  if (content) answer.content += content;
  // The tokens of the reasoning part are not kept: alternatives are shown where the answer is.
  for (const entry of choice.logprobs?.content ?? []) {
    const token = reader.read(entry);
    if (!reasoning) answer.tokens.push(token);
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function measure(answer, { usage, choices }, milliseconds, kept) {
  const { figures } = answer;
  const delta = choices?.[0]?.delta ?? {};
  if (delta.content || delta.reasoning_content || delta.reasoning) {
    figures.firstToken ??= milliseconds;
    figures.chunks = (figures.chunks ?? 0) + 1;
    figures.milliseconds = milliseconds;
  }
  // Chunks stand in for tokens until the server has counted them.
  figures.completionTokens = Math.max(answer.tokens.length - kept, figures.chunks ?? 0);
  if (usage) {
    figures.promptTokens = usage.prompt_tokens;
    figures.completionTokens = usage.completion_tokens;
    figures.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? null;
  }
}

/** Tokens per second behind the first, or null while there is too little to divide. */
export function speed({ firstToken, milliseconds, completionTokens }) {
  const taken = milliseconds - firstToken;
  return taken >= MEASURABLE_MILLISECONDS && completionTokens > 1 ? ((completionTokens - 1) / taken) * 1000 : null;
}

/** How many tokens of the context an answer and what stands above it take; null where the server has not said. */
export function contextTokens({ promptTokens, completionTokens }) {
  return promptTokens === undefined ? null : promptTokens + completionTokens;
}
