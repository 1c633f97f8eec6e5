// Keys for what is done often. All take Alt, so that none is in the way of writing; by place on the keyboard, because
// Alt and a letter write something of their own on some systems.

/** Listens for the keys; `act` has a function for each. */
export function shortcuts(act) {
  const byCode = {
    KeyN: act.create,
    KeyC: act.conversations,
    KeyS: act.settings,
    KeyR: act.regenerate,
    KeyE: act.edit,
    KeyK: act.keys,
    Comma: () => act.version(-1),
    Period: () => act.version(1),
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") return act.escape();
    const chosen = byCode[event.code];
    if (!chosen || !event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    chosen();
  });
}
