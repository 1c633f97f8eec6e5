// The request body for an answer.

import { ancestors } from "./conversation.js";
import { ALTERNATIVES, PARAMETERS } from "./parameters.js";

/** Builds the request for `answer`; if it already has text, the model continues this text. */
export function buildRequest(conversation, answer) {
  const { parameters } = conversation;
  // Failed answers without text are not part of the prompt.
  const nodes = ancestors(conversation, answer).filter((node) => node === answer || node.content !== "");
  const messages = nodes.map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim() !== "") messages.unshift({ role: "system", content: conversation.system });
  const request = { model: answer.model, messages };
  if (answer.content === "") messages.pop();
  else Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  for (const { name } of PARAMETERS) {
    if (typeof parameters[name] === "number") request[name] = parameters[name];
  }
  if (parameters.stop?.length) request.stop = parameters.stop;
  const alternatives = parameters.alternatives ?? ALTERNATIVES.defaultValue;
  if (alternatives > 0) Object.assign(request, { logprobs: true, top_logprobs: alternatives });
  return { ...request, ...parameters.extra_body };
}
