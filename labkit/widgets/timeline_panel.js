// The controls around the canvas: search, zoom buttons, legend, details.

import { duration, moment } from "./timeline_scene.js";

/** An element with attributes, listeners ("onclick") and children. Children that are null are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** The swatch of a shade. Only a themed shade has the colours that the stylesheet gives to its name. */
function swatchOf({ name, color, themed }) {
  const swatch = element("i", { class: "lkt-swatch", "data-shade": themed && name });
  swatch.style.setProperty("--lkt-swatch", color);
  return swatch;
}

const KEYS = [
  ["drag, ← →", "move in time"],
  ["wheel, + −", "zoom, once the timeline has the focus"],
  ["shift + wheel, ↑ ↓", "move, choose a lane"],
  ["click, Enter", "select what is there, or at the middle of the lane"],
  ["shift + ← →", "select the neighbour"],
  ["f, double click", "zoom to the selection, zoom in"],
  ["0", "show everything"],
  ["/, n, N", "search, next match, previous match"],
  ["Escape", "let go of the selection"],
];

export class Panel {
  /** `actions`: search(text, by), zoom(factor), all(), emphasise(shade), show(event), focus(). */
  constructor(scene, actions) {
    this.scene = scene;
    this.actions = actions;
    this.input = element("input", {
      type: "search",
      placeholder: "Search names",
      "aria-label": "Search the names of events",
      oninput: () => this.typed(),
      onkeydown: (event) => this.pressed(event),
    });
    this.count = element("output", { class: "lkt-count", "aria-live": "polite" });
    this.shown = element("span", { class: "lkt-shown" });
    const button = (text, label, onclick) =>
      element("button", { type: "button", title: label, "aria-label": label, onclick }, text);
    this.bar = element(
      "div",
      { class: "lkt-bar", role: "toolbar", "aria-label": "Search and zoom" },
      this.input,
      button("‹", "Previous match", () => actions.search(this.input.value, -1)),
      button("›", "Next match", () => actions.search(this.input.value, 1)),
      this.count,
      this.shown,
      button("−", "Zoom out", () => actions.zoom(1.6)),
      button("+", "Zoom in", () => actions.zoom(1 / 1.6)),
      button("All", "Show everything", () => actions.all()),
    );
    this.chips = new Map(
      scene.present.map((shade) => {
        const { name } = scene.shades[shade];
        const swatch = swatchOf(scene.shades[shade]);
        const chip = element(
          "button",
          { type: "button", title: name, "aria-pressed": "false", onclick: () => actions.emphasise(shade) },
          swatch,
          element("span", {}, name),
        );
        return [shade, chip];
      }),
    );
    this.legend = element(
      "div",
      { class: "lkt-legend", role: "group", "aria-label": "Colours; press one to emphasise it" },
      ...this.chips.values(),
    );
    this.details = element("div", {
      class: "lkt-details",
      role: "region",
      "aria-label": "Details of the selected event",
      "aria-live": "polite",
    });
    const keys = KEYS.map(([key, what]) => element("div", {}, element("dt", {}, key), element("dd", {}, what)));
    this.help = element(
      "details",
      { class: "lkt-help" },
      element("summary", {}, "Mouse and keys"),
      element("dl", {}, ...keys),
    );
    this.say(null);
  }

  typed() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.actions.search(this.input.value, 0), 180);
  }

  pressed(event) {
    if (event.key === "Enter") {
      clearTimeout(this.waiting);
      this.actions.search(this.input.value, event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      if (this.input.value) this.actions.search((this.input.value = ""), 0);
      this.actions.focus();
      event.preventDefault();
    }
  }

  found({ text, count, at }) {
    this.count.textContent = !text
      ? ""
      : count
        ? `${at.toLocaleString("en")} of ${count.toLocaleString("en")}`
        : "none found";
  }

  pressedChips(emphasised) {
    for (const [shade, chip] of this.chips) chip.setAttribute("aria-pressed", String(emphasised.has(shade)));
  }

  showing(ns) {
    const events = `${this.scene.events.toLocaleString("en")} events`;
    const left = this.scene.leftOut ? `, ${this.scene.leftOut.toLocaleString("en")} nested too deep to show` : "";
    this.shown.textContent = `${duration(ns)} in view, ${events} in all${left}`;
  }

  /** Shows the details of an event, or a hint if no event is selected. */
  say(chosen) {
    if (!chosen) {
      this.details.replaceChildren(
        element(
          "p",
          { class: "lkt-empty" },
          "Nothing selected: click an event, or choose a lane with ↑ ↓ and press Enter.",
        ),
      );
      return;
    }
    const { scene } = this;
    const present = scene.present.map((shade) => scene.shades[shade]);
    const swatch = swatchOf(present.find(({ name }) => name === chosen.shade));
    const where = scene.names.length > 1 ? [["trace", chosen.trace]] : [];
    const facts = [
      scene.staged ? ["stage", chosen.stage ?? "none"] : ["coloured as", chosen.shade === chosen.name ? null : chosen.shade],
      ["layer", chosen.layer],
      ["phase", chosen.phase],
      ["duration", duration(chosen.duration_ns)],
      ["start", moment(chosen.start_ns)],
      ...where,
      [chosen.on_gpu ? "stream" : "thread", chosen.thread],
      ["process", chosen.process],
      ...Object.entries(chosen.facts),
    ].filter(([, value]) => value !== null && value !== "");
    const list = element(
      "dl",
      {},
      ...facts.map(([name, value]) =>
        element("div", { "data-fact": name }, element("dt", {}, name), element("dd", {}, String(value))),
      ),
    );
    const parts = [
      element(
        "header",
        {},
        swatch,
        element("span", { class: "lkt-kind" }, chosen.kind),
        element("code", {}, chosen.name || "(no name)"),
      ),
      list,
      this.links("parents", chosen.on_gpu ? "launched inside" : "inside", chosen.parents),
      this.links("linked", chosen.on_gpu ? "launched by" : "launched", chosen.linked),
    ];
    this.details.replaceChildren(...parts.filter((part) => part !== null));
  }

  links(kind, label, events) {
    if (!events.length) return null;
    const buttons = events
      .slice(0, 12)
      .map((event) =>
        element(
          "button",
          { type: "button", title: event.name, onclick: () => this.actions.show(event.event) },
          element("b", {}, event.short),
          ` ${duration(event.duration_ns)}`,
        ),
      );
    const more = events.length > 12 ? element("span", {}, `and ${events.length - 12} more`) : null;
    return element(
      "nav",
      { class: `lkt-links lkt-${kind}`, "aria-label": label },
      element("span", {}, label),
      ...buttons,
      more,
    );
  }
}
