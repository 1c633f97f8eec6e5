// The file format of exported conversations and presets. Imported files are untrusted: every value is checked before use.

import { FORMAT } from "./conversation.js";
import { el } from "./dom.js";
import { newId } from "./identifier.js";
import { ALTERNATIVES, isAllowed, PARAMETERS, requirement, reservedField } from "./parameters.js";

const NUMBERS = [...PARAMETERS, ALTERNATIVES];
const PARAMETER_NAMES = [...NUMBERS.map(({ name }) => name), "stop", "extra_body"];
/** Maximum length of the name of a preset. */
export const MAX_PRESET_NAME = 100;
const ROLES = ["user", "assistant"];
const ID = /^[0-9a-f]{32}$/;
const URL_MILLISECONDS = 60_000;
const MAX_SHOWN_CHARACTERS = 80;

/** Downloads a list of "conversations" or "presets" as a file that the page can import. */
export function download(kind, list, name) {
  const text = JSON.stringify({ kind: `ferrule ${kind}`, format: FORMAT, [kind]: list }, null, 1);
  downloadText(text, name, "application/json", "json");
}

/** Downloads a text as a file of this type. */
export function downloadText(text, name, type, extension) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const fileName = name.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  el("a", { href: url, download: `${fileName || "conversation"}.${extension}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), URL_MILLISECONDS);
}

/** Parses the text of a file to conversations with new ids; throws an Error that names the invalid value. */
export function parseConversations(text) {
  return parseFile(text, "conversations").map((value, at) => parseConversation(value, `conversations[${at}]`));
}

/** Parses the text of a file to presets with different names; throws an Error that names the invalid value. */
export function parsePresets(text) {
  const presets = parseFile(text, "presets").map((value, at) => parsePreset(value, `presets[${at}]`));
  const names = new Set();
  for (const [at, { name }] of presets.entries()) {
    check(!names.has(name), `presets[${at}].name`, "different from those of earlier presets", name);
    names.add(name);
  }
  return presets;
}

// Returns the list of a file of this kind.
function parseFile(text, kind) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not valid JSON: ${error.message}`);
  }
  check(file?.kind === `ferrule ${kind}`, "kind", `"ferrule ${kind}"`, file?.kind);
  check(file.format === FORMAT, "format", String(FORMAT), file.format);
  check(Array.isArray(file[kind]), kind, "a list", file[kind]);
  return file[kind];
}

function parsePreset(value, path) {
  check(isObject(value), path, "an object", value);
  const name = parseString(value.name, `${path}.name`).trim();
  const isShort = name !== "" && name.length <= MAX_PRESET_NAME;
  check(isShort, `${path}.name`, `a text of 1 to ${MAX_PRESET_NAME} characters`, value.name);
  const parameters = parseParameters(value.parameters, `${path}.parameters`);
  // Presets are edited by hand, too.
  const unknown = Object.keys(value.parameters).find((field) => !PARAMETER_NAMES.includes(field));
  check(unknown === undefined, `${path}.parameters`, `without ${unknown}, which is not a parameter`, value.parameters);
  return { name, system: parseString(value.system, `${path}.system`), parameters };
}

function parseConversation(value, path) {
  check(isObject(value), path, "an object", value);
  check(isObject(value.nodes), `${path}.nodes`, "an object", value.nodes);
  const entries = Object.entries(value.nodes);
  const nodes = Object.fromEntries(entries.map(([id, node]) => [id, parseNode(node, id, `${path}.nodes.${id}`)]));
  const earlier = new Set();
  for (const [id, node] of Object.entries(nodes)) {
    // In a damaged file a parent is missing; the messages below it are kept as a version of the first message.
    if (node.parent !== null && !Object.hasOwn(nodes, node.parent)) node.parent = null;
    // A parent precedes its children, so that the graph has no cycles.
    const isEarlier = node.parent === null || earlier.has(node.parent);
    check(isEarlier, `${path}.nodes.${id}.parent`, "null or an earlier node", node.parent);
    earlier.add(id);
  }
  const selected = isObject(value.selected) ? Object.entries(value.selected) : [];
  return {
    format: FORMAT,
    id: newId(),
    ...(value.pinned ? { pinned: 1 } : {}),
    title: parseString(value.title, `${path}.title`),
    created: parseNumber(value.created, `${path}.created`),
    updated: parseNumber(value.updated, `${path}.updated`),
    model: value.model === null ? null : parseString(value.model, `${path}.model`),
    system: parseString(value.system, `${path}.system`),
    parameters: parseParameters(value.parameters, `${path}.parameters`),
    nodes,
    selected: Object.fromEntries(selected.filter(([, id]) => Object.hasOwn(nodes, id))),
  };
}

function parseNode(node, id, path) {
  check(ID.test(id) && isObject(node) && node.id === id, path, "an object with this id of 32 hexadecimal digits", node);
  check(ROLES.includes(node.role), `${path}.role`, ROLES.join(" or "), node.role);
  const common = {
    id,
    parent: node.parent === null ? null : parseString(node.parent, `${path}.parent`),
    role: node.role,
    content: parseString(node.content, `${path}.content`),
    created: parseNumber(node.created, `${path}.created`),
  };
  if (node.role === "user") return { ...common, attachments: parseAttachments(node, path) };
  const { error } = node;
  return {
    ...common,
    model: node.model === null ? null : parseString(node.model, `${path}.model`),
    reasoning: parseString(node.reasoning, `${path}.reasoning`),
    tokens: parseTokens(node.tokens, `${path}.tokens`),
    statistics: isObject(node.statistics) ? numbersOf(node.statistics) : null,
    contextStart: node.contextStart ? parseString(node.contextStart, `${path}.contextStart`) : null,
    finishReason: typeof node.finishReason === "string" ? node.finishReason : "stopped",
    error: isObject(error) ? { message: parseString(error.message, `${path}.error.message`), status: null } : null,
  };
}

function parseAttachments({ attachments = [] }, path) {
  check(Array.isArray(attachments), `${path}.attachments`, "a list", attachments);
  return attachments.map((attachment, at) => {
    const item = `${path}.attachments[${at}]`;
    check(isObject(attachment), item, "an object", attachment);
    return { name: parseString(attachment.name, `${item}.name`), text: parseString(attachment.text, `${item}.text`) };
  });
}

function parseTokens(tokens, path) {
  check(Array.isArray(tokens), path, "a list", tokens);
  return tokens.map((token, at) => {
    const item = `${path}[${at}]`;
    check(isObject(token) && Array.isArray(token.top), item, 'an object with a list "top"', token);
    const top = token.top.map((other) => {
      check(Array.isArray(other), `${item}.top`, "a list of pairs", token.top);
      return [parseString(other[0], `${item}.top`), parseNumber(other[1], `${item}.top`)];
    });
    const text = parseString(token.text, `${item}.text`);
    return { text, logprob: parseNumber(token.logprob, `${item}.logprob`), top };
  });
}

function parseParameters(value, path) {
  check(isObject(value), path, "an object", value);
  const parameters = {};
  for (const parameter of NUMBERS) {
    const { name } = parameter;
    if (value[name] === undefined) continue;
    check(isAllowed(parameter, value[name]), `${path}.${name}`, requirement(parameter), value[name]);
    parameters[name] = value[name];
  }
  if (value.stop !== undefined) {
    check(Array.isArray(value.stop), `${path}.stop`, "a list", value.stop);
    parameters.stop = value.stop.map((text) => parseString(text, `${path}.stop`));
  }
  if (value.extra_body !== undefined) {
    check(isObject(value.extra_body), `${path}.extra_body`, "an object", value.extra_body);
    const reserved = reservedField(value.extra_body);
    check(!reserved, `${path}.extra_body`, `without ${reserved}, which the page sets`, value.extra_body);
    parameters.extra_body = value.extra_body;
  }
  return parameters;
}

function numbersOf(object) {
  return Object.fromEntries(Object.entries(object).filter(([, value]) => Number.isFinite(value)));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function parseString(value, path) {
  check(typeof value === "string", path, "a string", value);
  return value;
}

function parseNumber(value, path) {
  check(Number.isFinite(value), path, "a number", value);
  return value;
}

function check(isValid, path, requirement, value) {
  if (isValid) return;
  const found = (JSON.stringify(value) ?? "nothing").slice(0, MAX_SHOWN_CHARACTERS);
  throw new Error(`The file is invalid: ${path} must be ${requirement}, got ${found}`);
}
