// The messages that fit in the context of a model. When it is full, the oldest ones are left out of the prompt. They stay
// visible, above a mark.

import { countTokens } from "./api.js";
import { buildRequest, promptNodes } from "./request.js";

// Share of the context that is kept free for the answer, if it may be that long.
const ANSWER_SHARE = 0.25;
// Share of the room for the prompt that is used after messages were left out. The rest is for the next messages: they
// then extend the same prompt, which the server has in its prefix cache.
const KEPT_SHARE = 0.75;
// Maximum number of bytes in UTF-8 of a unit of a JavaScript text. Texts that are surely short enough are not encoded,
// because that takes longer than showing a message.
const MAX_BYTES_PER_UNIT = 3;
// A token has at least one byte; a chat template adds some tokens for each message, and perhaps a system prompt.
const [TOKENS_PER_MESSAGE, TOKENS_OF_TEMPLATE] = [32, 256];
// Statuses of prompts that are surely too long: an invalid request, and a body above the limit of the server.
const [INVALID, TOO_LARGE] = [400, 413];

/** Returns the id of the first message that is sent for `answer`, or null if all are; throws a ServerError. */
export async function firstMessage(conversation, answer, model, signal) {
  const { max_model_len: limit, answer_defaults: defaults } = model;
  const nodes = promptNodes(conversation, answer);
  const begin = Math.max(0, nodes.findIndex(({ id }) => id === latestStart(nodes)));
  if (!limit) return null;
  const request = (start) => buildRequest(conversation, { ...answer, contextStart: nodes[start].id }, defaults);
  const room = Math.min(request(begin).max_tokens ?? limit, limit * ANSWER_SHARE);
  const result = (start) => (start === 0 ? null : nodes[start].id);
  if ((await size(request(begin), signal, limit - room)) <= limit - room) return result(begin);

  // A prompt begins with a message of the user.
  const starts = [...nodes.keys()].filter((at) => at > begin && nodes[at].role === "user");
  let [low, high] = [0, starts.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((await size(request(starts[middle]), signal)) <= (limit - room) * KEPT_SHARE) high = middle;
    else low = middle + 1;
  }
  if (low < starts.length) return result(starts[low]);
  const last = starts.at(-1);
  // The server refuses a last message that is too long alone, with an error that has the numbers.
  return result(last !== undefined && (await size(request(last), signal)) < limit ? last : begin);
}

// The last answer before the new one began with this message.
function latestStart(nodes) {
  return nodes.findLast(({ contextStart }) => contextStart)?.contextStart;
}

/** Returns the number of tokens of a prompt; an upper bound if it is at most `enough`. */
async function size(request, signal, enough = 0) {
  const { messages } = request;
  const fixed = messages.length * TOKENS_PER_MESSAGE + TOKENS_OF_TEMPLATE;
  const units = messages.reduce((sum, { content }) => sum + content.length, 0);
  if (units * MAX_BYTES_PER_UNIT + fixed <= enough) return units * MAX_BYTES_PER_UNIT + fixed;
  // A unit has at least one byte.
  if (units + fixed <= enough) {
    const bound = new TextEncoder().encode(messages.map(({ content }) => content).join("")).length + fixed;
    if (bound <= enough) return bound;
  }
  try {
    return await countTokens(request, signal);
  } catch (error) {
    if (error.status === INVALID || error.status === TOO_LARGE) return Infinity;
    throw error;
  }
}
