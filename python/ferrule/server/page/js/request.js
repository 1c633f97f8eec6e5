// The request for an answer, from what is shown above it and what is set for the conversation.

import { ancestry } from "./conversation.js";
import { ALTERNATIVES, PARAMETERS } from "./parameters.js";

/** The body that asks for `answer`; where it holds text already, the model goes on behind it. */
export function requestFor(conversation, answer) {
  const { parameters } = conversation;
  const line = ancestry(conversation, answer);
  // Of an answer that was refused there is nothing to tell.
  const said = line.filter((node) => node === answer || node.content !== "");
  const messages = said.map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim() !== "") messages.unshift({ role: "system", content: conversation.system });
  const request = { model: answer.model, messages };
  if (answer.content === "") messages.pop();
  else Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  for (const { name } of PARAMETERS) {
    if (typeof parameters[name] === "number") request[name] = parameters[name];
  }
  if (parameters.stop?.length) request.stop = parameters.stop;
  const alternatives = parameters.alternatives ?? ALTERNATIVES.usual;
  if (alternatives > 0) Object.assign(request, { logprobs: true, top_logprobs: alternatives });
  return { ...request, ...parameters.further };
}
