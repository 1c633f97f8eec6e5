// The request body for an answer: the messages, and the sampling parameters with the defaults of the model.

import { messageText } from "./attachments.js";
import { ancestors } from "./conversation.js";
import { ALTERNATIVES, PARAMETERS } from "./parameters.js";

/**
 * Builds the request for `answer`; if it already has text, the model continues this text. The messages begin with
 * `answer.contextStart`, if that is set. `defaults` are the parameters of the model's answers.
 */
export function buildRequest(conversation, answer, defaults) {
  const nodes = promptNodes(conversation, answer);
  const start = nodes.findIndex(({ id }) => id === answer.contextStart);
  const messages = nodes.slice(Math.max(0, start)).map((node) => ({ role: node.role, content: messageText(node) }));
  if (conversation.system.trim() !== "") messages.unshift({ role: "system", content: conversation.system });
  const request = { model: answer.model, messages };
  if (answer.content === "") messages.pop();
  else Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  return { ...request, ...samplingFields(conversation.parameters, defaults) };
}

/** Returns the messages before an answer, and the answer; failed answers without text are not part of a prompt. */
export function promptNodes(conversation, answer) {
  return ancestors(conversation, answer).filter((node) => node === answer || messageText(node) !== "");
}

/** Returns the fields of a request that the parameters of a conversation set, with defaults for the others. */
export function samplingFields(parameters, defaults) {
  const fields = { ...defaults, stop_on_loop: true };
  // The default limit does not contradict a minimum length.
  const minimum = parameters.extra_body?.min_tokens;
  if (minimum > fields.max_tokens) fields.max_tokens = minimum;
  for (const { name } of PARAMETERS) {
    if (typeof parameters[name] === "number") fields[name] = parameters[name];
  }
  if (parameters.stop?.length) fields.stop = parameters.stop;
  const alternatives = parameters.alternatives ?? ALTERNATIVES.defaultValue;
  if (alternatives > 0) Object.assign(fields, { logprobs: true, top_logprobs: alternatives });
  return { ...fields, ...parameters.extra_body };
}
