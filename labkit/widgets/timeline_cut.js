// Tiles cut from the events of a page; tiles.py describes a tile.

const WIDE = 2; // least width in columns of an event that is drawn by itself
const FAINTEST = 48; // of 255, for a column that is not empty

/** The columns of one lane of a tile: the time of each shade in each column, and the shades that begin there. */
class Columns {
  constructor(scene, begin, width) {
    Object.assign(this, { columns: scene.columns, shades: scene.shades.length, begin, width });
    this.time = new Float64Array(this.columns * this.shades);
    this.begun = new Uint8Array(this.columns * this.shades);
    this.touched = new Uint8Array(this.columns);
  }

  clear() {
    for (const all of [this.time, this.begun, this.touched]) all.fill(0);
  }

  add(from, to, shade) {
    const { begin, width } = this;
    const first = Math.max(Math.floor((from - begin) / width), 0);
    const last = Math.min(Math.max(Math.ceil((to - begin) / width) - 1, first), this.columns - 1);
    for (let at = first; at <= last; at++) {
      const left = begin + at * width;
      this.time[at * this.shades + shade] += Math.min(to, left + width) - Math.max(from, left);
      if (from >= left) this.begun[at * this.shades + shade] = 1;
      this.touched[at] = 1;
    }
  }

  /** Writes the shade with the most time in each column, and the load of the column. */
  write(shade, fill) {
    for (let at = 0; at < this.columns; at++) {
      if (!this.touched[at]) continue;
      let [most, sum] = [0, 0];
      for (let each = at * this.shades; each < (at + 1) * this.shades; each++) {
        sum += this.time[each];
        const weight = this.time[each] + this.begun[each]; // an event without length counts, too
        if (weight > most) [most, shade[at]] = [weight, each - at * this.shades];
      }
      fill[at] = Math.min(Math.max(Math.floor((sum * 255) / this.width), FAINTEST), 255);
    }
  }
}

/** The first event of a lane that runs at `time` or begins then or later. */
function firstFrom(events, lane, time) {
  let event = events.after(lane, time);
  const here = (before) => events.start[before] === time || events.end[before] > time;
  while (event > events.bounds[lane] && here(event - 1)) event--; // nothing overlaps: at most one began earlier
  return event;
}

/** The tile of a level and index. Its cost grows with its events, so that every level costs the same in total. */
export function cutTile(events, level, index) {
  const { scene } = events;
  const { columns } = scene;
  const width = 2 ** (scene.exponent - level);
  const begin = scene.origin + index * columns * width;
  const end = begin + columns * width;
  const lane = new Columns(scene, begin, width);
  const [wide, rows] = [[], []];
  const columnShade = new Uint8Array(columns * scene.lanes);
  const columnFill = new Uint8Array(columns * scene.lanes);
  for (let row = 0; row < scene.lanes; row++) {
    const beyond = events.bounds[row + 1];
    let event = firstFrom(events, row, begin);
    if (event === beyond || events.start[event] >= end) continue;
    lane.clear();
    for (; event < beyond && events.start[event] < end; event++) {
      const [from, to] = [events.start[event], events.end[event]];
      if (to - from >= WIDE * width) wide.push(event);
      lane.add(from, to, events.shade[event]);
    }
    const part = [rows.length * columns, (rows.length + 1) * columns];
    lane.write(columnShade.subarray(...part), columnFill.subarray(...part));
    rows.push(row);
  }
  wide.sort((a, b) => events.shade[a] - events.shade[b] || a - b);
  const chosen = (column) => column.constructor.from(wide, (event) => column[event]);
  return {
    level,
    index,
    texts: new Map(wide.map((event) => [events.name[event], events.short(events.name[event])])),
    image: null,
    inks: -1,
    start: chosen(events.start),
    end: chosen(events.end),
    event: Int32Array.from(wide),
    lane: chosen(events.lane),
    shade: chosen(events.shade),
    name: chosen(events.name),
    rows: Uint16Array.from(rows),
    columnShade: columnShade.slice(0, rows.length * columns),
    columnFill: columnFill.slice(0, rows.length * columns),
  };
}
