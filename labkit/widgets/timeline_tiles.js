// Tiles: parts of the timeline from Python, kept by level and index, and requested if missing.

const KEPT = 300; // tiles
const ASKED = 4; // requests at a time, so that the next request fits the latest view

const BUFFERS = {
  start: Float64Array,
  end: Float64Array,
  event: Int32Array,
  lane: Uint16Array,
  shade: Uint8Array,
  name: Int32Array,
  rows: Uint16Array, // lanes that have columns
  columnShade: Uint8Array, // a row of columns for each of these lanes
  columnFill: Uint8Array,
};

/** A tile from a message: its arrays, and `texts`, the names of its longer events. */
export function decodeTile(content, buffers) {
  const tile = { level: content.level, index: content.index, texts: new Map(content.texts), image: null, inks: -1 };
  Object.entries(BUFFERS).forEach(([name, Type], at) => {
    const view = buffers[at]; // a DataView may have any offset, while typed arrays need an aligned one
    const bytes = ArrayBuffer.isView(view)
      ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength)
      : view;
    tile[name] = new Type(bytes);
  });
  return tile;
}

export class TileStore {
  /** `ask` sends a list of [level, index] to Python. */
  constructor(scene, ask) {
    this.scene = scene;
    this.ask = ask;
    this.tiles = new Map();
    this.asked = new Map(); // time of the request by key
    this.wanted = [];
  }

  key(level, index) {
    return `${level}/${index}`;
  }

  columnNs(level) {
    return 2 ** (this.scene.exponent - level);
  }

  tileNs(level) {
    return this.columnNs(level) * this.scene.columns;
  }

  /** The level whose columns are one pixel or up to half of that. */
  levelFor(nsPerPixel) {
    const level = this.scene.exponent - Math.floor(Math.log2(nsPerPixel));
    return Math.min(Math.max(level, 0), this.scene.levels - 1);
  }

  /** The indices of the tiles of a level that lie between two times. */
  between(level, begin, end) {
    const width = this.tileNs(level);
    const last = Math.ceil((this.scene.end - this.scene.origin) / width) - 1;
    const from = Math.max(Math.floor((begin - this.scene.origin) / width), 0);
    const to = Math.min(Math.floor((end - this.scene.origin) / width), Math.max(last, 0));
    return Array.from({ length: Math.max(to - from + 1, 0) }, (_, at) => from + at);
  }

  get(level, index) {
    const key = this.key(level, index);
    const tile = this.tiles.get(key);
    if (tile) {
      this.tiles.delete(key); // so that the first entry of the map is the longest unused one
      this.tiles.set(key, tile);
    }
    return tile;
  }

  /** The tile, or the finest stored tile that covers its time; null if there is none. */
  nearest(level, index) {
    for (let up = 0; up <= level; up++) {
      const tile = this.get(level - up, Math.floor(index / 2 ** up));
      if (tile) return tile;
    }
    return null;
  }

  add(tile) {
    const key = this.key(tile.level, tile.index);
    this.tiles.set(key, tile);
    this.asked.delete(key);
    for (const [old, { level }] of this.tiles) {
      if (this.tiles.size <= KEPT) break;
      if (level > 2) this.tiles.delete(old);
    }
    this.next();
  }

  /** Sets the tiles to request, the most urgent first. */
  want(list) {
    this.wanted = list;
    this.next();
  }

  next() {
    const now = performance.now();
    for (const [key, when] of this.asked) if (now - when > 10000) this.asked.delete(key); // the kernel was restarted
    const missing = this.wanted.filter(([level, index]) => {
      const key = this.key(level, index);
      return !this.tiles.has(key) && !this.asked.has(key);
    });
    const sent = missing.slice(0, ASKED - this.asked.size);
    if (!sent.length) return;
    for (const [level, index] of sent) this.asked.set(this.key(level, index), now);
    this.ask(sent);
  }
}
