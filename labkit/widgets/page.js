// The page of a live notebook: it saves the content of its widgets with the notebook, so that the notebook shows it
// even when it is opened again without the kernel.
const STATE = "application/vnd.jupyter.widget-state+json";
const REST_MS = 500;
const SAVE = Symbol.for("labkit.save"); // a notebook's function that saves it, shared by its widgets

// The widget models that cells show, and the models that these refer to, by their ids.
function shown(state, cells) {
  const kept = {};
  const waiting = [JSON.stringify(cells)];
  while (waiting.length) {
    for (const [id] of waiting.pop().matchAll(/[0-9a-f]{32}/g)) {
      if (!(id in state) || id in kept) continue;
      kept[id] = state[id];
      waiting.push(JSON.stringify(state[id]));
    }
  }
  return kept;
}

// A function that saves a notebook, after a save that is in progress: JupyterLab takes the file of a save that ends
// during another save for a stranger's change, and asks the user about it.
function saveInTurn(context) {
  let own = false;
  let other = false;
  let requested = false;
  const save = () => {
    requested = own || other;
    if (requested) return;
    own = true;
    const ended = () => {
      own = false;
      if (requested) save();
    };
    context.save().then(ended, ended); // JupyterLab itself says an error
  };
  context.saveState.connect((_, state) => {
    other = !own && state === "started";
    if (!own && !other && requested) save();
  });
  return save;
}

// Calls `save` once the kernel has rested for a while, so that all cells that were run have their outputs.
function saveAfterCells(context, save) {
  let timer = null;
  const follow = (session, status) => {
    clearTimeout(timer);
    if (status !== "idle") return;
    timer = setTimeout(() => {
      session.statusChanged.disconnect(follow);
      save();
    }, REST_MS);
  };
  context.sessionContext.statusChanged.connect(follow);
  return () => {
    clearTimeout(timer);
    context.sessionContext.statusChanged.disconnect(follow);
  };
}

function initialize({ model }) {
  const manager = model.widget_manager;
  const context = manager?.context; // only in JupyterLab; other pages save widgets in their own way
  if (!context?.saveState) return;
  const keep = (_, begun) => {
    if (begun !== "started") return;
    const all = manager.get_state_sync({ drop_defaults: true });
    const state = shown(all.state, context.model.toJSON().cells);
    context.model.setMetadata("widgets", { [STATE]: { ...all, state } });
  };
  const save = (context[SAVE] ??= saveInTurn(context));
  // Results that were measured while no page was open are saved by the first page that sees them.
  const saveUnsaved = () => {
    const saved = Object.values(context.model.getMetadata("widgets")?.[STATE]?.state ?? {});
    if (!saved.some((known) => known.state.results === model.get("results"))) save();
  };
  context.saveState.connect(keep);
  model.on("change:results", save);
  if (model.get("results") && !manager.restoredStatus) manager.restored.connect(saveUnsaved);
  // The file still names the widgets of earlier cells: a page that is loaded again would not find them in the kernel.
  const forget = manager.restoredStatus ? saveAfterCells(context, save) : () => {};
  return () => {
    forget();
    context.saveState.disconnect(keep);
    manager.restored.disconnect(saveUnsaved);
    model.off("change:results", save);
  };
}

export default { initialize };
