// Entry point: creates the parts of the page and connects their actions.

import { createAnswers } from "./answers.js";
import { createComposer } from "./composer.js";
import { markInterrupted, merge, newConversation, path } from "./conversation.js";
import { createConversationList } from "./conversation-list.js";
import * as database from "./database.js";
import { askForApiKey, confirmDeletion, showShortcuts } from "./dialogs.js";
import { byId } from "./dom.js";
import { createImportExport } from "./import-export.js";
import { createMessageActions } from "./message-actions.js";
import { createModelPicker } from "./models.js";
import { clearNotice, showNotice } from "./notice.js";
import { createSettings } from "./settings.js";
import { addShortcuts } from "./shortcuts.js";
import { createSidebars } from "./sidebars.js";
import { contextUsage, showContextUsage } from "./statistics.js";
import { readStorage, writeStorage } from "./storage.js";
import { initTheme } from "./theme.js";
import { createThread } from "./thread.js";

const CURRENT_CONVERSATION = "ferrule-conversation";
const [UNAUTHORIZED, UNAVAILABLE] = [401, 503];
// Interval of requests to a server that is still loading its model.
const LOADING_MILLISECONDS = 2000;

let conversation = newConversation();
// Conversations with changes that are not saved yet.
const unsaved = new Set();

const sidebars = createSidebars();
const models = createModelPicker(() => {
  conversation.model = models.selected();
  showModelDefaults();
});
const settings = createSettings(() => saveUnlessEmpty());
const files = createImportExport({ current: () => conversation, show: showConversation, refresh: refreshList });
const list = createConversationList({ open, rename, pin, ...files, remove });
const messages = createMessageActions({
  current: () => conversation,
  models,
  answers: () => answers,
  thread: () => thread,
  composer: () => composer,
  save,
  render,
  loadModels,
});
const thread = createThread(messages.handlers);
const answers = createAnswers({ onStart, onProgress, onEnd, save, refreshModel });
const composer = createComposer({ send: messages.send, stop: () => answers.stop(conversation.id) });

function render() {
  const running = answers.get(conversation.id);
  thread.show(conversation, running?.answer.id);
  composer.setRunning(running !== null);
  updateContextUsage();
  document.title = conversation.title ? `${conversation.title} · ferrule` : "ferrule";
}

function updateContextUsage() {
  const visible = path(conversation).filter(({ role }) => role === "assistant");
  const model = visible.at(-1)?.model ?? models.selected();
  showContextUsage(byId("context"), contextUsage(visible, models.all(), model));
}

function showModelDefaults() {
  settings.showDefaults(models.find(models.selected())?.answer_defaults ?? null);
}

async function refreshList() {
  const entries = await database.list().catch(() => []);
  const { id, title } = conversation;
  if (!entries.some((entry) => entry.id === id)) entries.unshift({ id, title, updated: Date.now(), isPinned: false });
  list.show(entries, id);
}

// --- Conversations

function showConversation(next) {
  conversation = next;
  list.select(conversation.id);
  writeStorage("session", CURRENT_CONVERSATION, conversation.id);
  models.select(conversation.model);
  settings.show(conversation);
  showModelDefaults();
  thread.scrollToEnd();
  render();
}

async function create() {
  if (path(conversation).length > 0) {
    // A new conversation has the settings of the current one.
    showConversation(newConversation(conversation));
    await refreshList();
  }
  sidebars.closeOverlays();
  composer.focus();
}

async function open(id) {
  if (id !== conversation.id) {
    const found = await find(id);
    if (!found) return refreshList();
    showConversation(found);
    await refreshList();
  }
  if (sidebars.closeOverlays()) composer.focus();
}

// A conversation with a running answer is newer in memory than in the database.
async function find(id) {
  const running = answers.get(id);
  if (running) return running.conversation;
  const saved = await database.load(id);
  return saved && markInterrupted(saved);
}

async function onOtherTabChange(ids) {
  for (const id of ids) {
    const local = answers.get(id)?.conversation ?? (id === conversation.id ? conversation : null);
    if (!local) continue;
    const saved = await database.load(id);
    if (saved) applyChanges(local, saved);
    else await close(id);
  }
  await refreshList();
}

function applyChanges(local, saved) {
  const { system, parameters } = local;
  merge(local, saved);
  database.adoptSettings(local, saved);
  if (local !== conversation) return;
  // Unchanged settings are not shown again, because the user may be editing a field.
  const hasSameSettings = JSON.stringify([system, parameters]) === JSON.stringify([local.system, local.parameters]);
  if (!hasSameSettings) settings.show(conversation);
  render();
}

async function rename(id, title) {
  conversation.title = title;
  await save(conversation);
  render();
}

async function pin(isPinned) {
  if (isPinned) conversation.pinned = 1;
  else delete conversation.pinned;
  await save(conversation);
}

async function remove(id, title) {
  if (!(await confirmDeletion("conversation", title))) return;
  await database.remove(id);
  await close(id);
  await refreshList();
  composer.focus();
}

/** Stops the answer of a deleted conversation and shows another conversation if it was visible. */
async function close(id) {
  answers.stop(id);
  if (id !== conversation.id) return;
  const [next] = await database.list();
  showConversation(next ? await find(next.id) : newConversation(conversation));
}

async function save(changed) {
  unsaved.add(changed);
  const saving = [...unsaved];
  try {
    await database.save(...saving);
    for (const saved of saving) unsaved.delete(saved);
    clearNotice("conversations");
    await refreshList();
  } catch (error) {
    const message = `Cannot save the conversation in this browser: ${error.message}`;
    showNotice("conversations", message, () => save(changed));
  }
}

function saveUnlessEmpty() {
  if (path(conversation).length > 0) save(conversation);
}

// --- Answers

function onStart(changed) {
  if (changed === conversation) render();
  save(changed);
}

function onProgress(changed, node) {
  if (changed !== conversation) return;
  thread.refresh(conversation, node, true);
  updateContextUsage();
}

async function onEnd(changed, node) {
  await save(changed);
  if (changed === conversation) render();
  const hasNewKey = node.error?.status === UNAUTHORIZED && (await askForApiKey(node.error.message));
  if (hasNewKey && changed === conversation) messages.handlers.regenerate(node);
}

function closeOrStop() {
  if (!sidebars.closeOverlays()) answers.stop(conversation.id);
}

// --- Start

async function loadModels() {
  try {
    await models.load();
    models.select(conversation.model);
    showModelDefaults();
    updateContextUsage();
    clearNotice("server");
  } catch (error) {
    showNotice("server", error.message, loadModels);
    if (error.status === UNAVAILABLE) setTimeout(loadModels, LOADING_MILLISECONDS);
  }
}

async function refreshModel(id) {
  await loadModels();
  return models.find(id);
}

async function restore() {
  try {
    const [latest] = await database.list();
    const current = await find(readStorage("session", CURRENT_CONVERSATION) ?? "");
    showConversation(current ?? (latest && (await find(latest.id))) ?? conversation);
    await refreshList();
  } catch (error) {
    showConversation(conversation);
    list.show([], conversation.id);
    const retry = () => (path(conversation).length > 0 ? save(conversation) : restore());
    showNotice("conversations", `This browser does not save conversations: ${error.message}`, retry);
  }
}

initTheme();
addShortcuts({
  newChat: create,
  conversations: () => sidebars.toggle("sidebar"),
  settings: () => sidebars.toggle("settings"),
  regenerate: messages.regenerateLast,
  edit: messages.editLast,
  showShortcuts,
  stepVersion: messages.stepVersion,
  escape: closeOrStop,
});
byId("new").addEventListener("click", create);
byId("shortcuts").addEventListener("click", showShortcuts);
for (const example of document.querySelectorAll("#examples button")) {
  example.addEventListener("click", () => composer.setText(example.textContent));
}
database.onChange(onOtherTabChange);
addEventListener("pagehide", () => answers.conversations().forEach(save));
await restore();
await loadModels();
composer.focus();
