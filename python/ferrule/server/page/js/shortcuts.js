// Keyboard shortcuts. All use Alt, so that they do not interfere with typing. Keys are identified by their position on
// the keyboard, because Alt and a letter produce another character on some systems.

/** Listens for the shortcuts; `handlers` has a function for each. */
export function addShortcuts(handlers) {
  const byCode = {
    KeyN: handlers.newChat,
    KeyC: handlers.conversations,
    KeyS: handlers.settings,
    KeyR: handlers.regenerate,
    KeyE: handlers.edit,
    KeyK: handlers.showShortcuts,
    Comma: () => handlers.stepVersion(-1),
    Period: () => handlers.stepVersion(1),
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") return handlers.escape();
    const handler = byCode[event.code];
    if (!handler || !event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    handler();
  });
}
