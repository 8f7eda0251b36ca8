// The tree of turns: layout, drawing and keyboard navigation. Knows nothing of the server.

/** Distances in pixels. A column is a turn, a lane is a branch. */
const COLUMN = 46;
const LANE = 42;
const LEFT = 24;
const TOP = 19;
const BOTTOM = 31;

/**
 * Lays out turns (oldest first). A turn stands one column after its parent. The first continuation stays in its parent's
 * lane, and each later one opens a lane below. The position of the head does not change the layout.
 */
export function layout(turns) {
  const nodes = new Map();
  const roots = [];
  for (const turn of turns) nodes.set(turn.version, { turn, children: [], parent: null, depth: 0, lane: 0, onPath: false });
  for (const node of nodes.values()) {
    node.parent = nodes.get(node.turn.parent) ?? null;
    (node.parent?.children ?? roots).push(node);
  }
  let lanes = 0;
  const open = roots.map((node) => [node, true]).reverse();
  while (open.length) { // not recursive, because a long conversation would overflow the call stack
    const [node, opens] = open.pop();
    if (opens) lanes += 1;
    node.lane = lanes - 1;
    node.depth = node.parent ? node.parent.depth + 1 : 0;
    for (let i = node.children.length - 1; i >= 0; i -= 1) open.push([node.children[i], i > 0]);
  }
  const all = [...nodes.values()];
  for (let node = all.find((one) => one.turn.head); node; node = node.parent) node.onPath = true;
  return { nodes, all, lanes, columns: 1 + Math.max(0, ...all.map((node) => node.depth)) };
}

/** Describes a turn in words, for screen readers. */
export function described(node) {
  const { turn } = node;
  const parts = [`${turn.tokens === 0 ? "The empty beginning" : title(node)}, ${short(turn.tokens)} tokens`];
  if (turn.label) parts.push(`“${turn.label}”`);
  if (turn.tags.length) parts.push(`tagged ${turn.tags.join(", ")}`);
  if (node.forks) parts.push(node.forks === 1 ? "1 fork" : `${node.forks} forks`);
  if (turn.elsewhere) parts.push("written in another conversation");
  parts.push(new Date(turn.time).toLocaleString());
  if (turn.head) parts.push("current turn");
  else if (!node.onPath) parts.push("on another branch");
  if (!turn.kept) parts.push("state no longer stored");
  return parts.join(", ");
}

export function title(node) {
  if (node.turn.tokens === 0) return "Beginning";
  if (!node.parent) return "Start";
  return node.turn.kind === "interrupted" ? `Turn ${node.depth}, stopped` : `Turn ${node.depth}`;
}

function element(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export class Tree {
  /** `onSelect` is called with the selected version, and whether to move the focus to its buttons. */
  constructor(onSelect) {
    this.svg = document.getElementById("tree");
    this.scroller = this.svg.parentElement;
    this.onSelect = onSelect;
    this.places = layout([]);
    this.selected = null;
    this.svg.addEventListener("click", (event) => this.choose(event.target.closest("[data-version]")));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** `forks` maps versions to the sessions that were forked from them. */
  show(turns, selected, forks) {
    const hadFocus = this.svg.contains(document.activeElement);
    this.places = layout(turns);
    for (const node of this.places.all) node.forks = forks.get(node.turn.version)?.length ?? 0;
    this.selected = selected;
    const { all, lanes, columns } = this.places;
    this.svg.setAttribute("width", LEFT * 2 + (columns - 1) * COLUMN);
    this.svg.setAttribute("height", TOP + Math.max(0, lanes - 1) * LANE + BOTTOM);
    // The path to the head is drawn last, on top of other branches.
    const inOrder = [...all.filter((node) => !node.onPath), ...all.filter((node) => node.onPath)];
    const edges = inOrder.filter((node) => node.parent).map((node) => this.edge(node));
    this.svg.replaceChildren(element("g", { "aria-hidden": "true" }, ...edges), ...all.map((node) => this.node(node)));
    if (hadFocus) this.mark(selected)?.focus({ preventScroll: true });
  }

  edge(node) {
    const [x0, y0, x1, y1] = [...spot(node.parent), ...spot(node)];
    const bend = x0 + COLUMN * 0.55;
    // A branch leaves its parent's lane at once and then runs level.
    const path = y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}C${bend} ${y0} ${x0 + 8} ${y1} ${x1} ${y1}`;
    return element("path", { class: node.onPath ? "edge path" : "edge", d: path });
  }

  node(node) {
    const { turn } = node;
    const [x, y] = spot(node);
    const classes = ["node", node.onPath && "path", turn.head && "head", !turn.kept && "hollow"].filter(Boolean);
    const chosen = turn.version === this.selected;
    const siblings = node.parent?.children ?? [node];
    const shapes = [
      element("title", {}, described(node)),
      element("rect", { class: "reach", x: x - COLUMN / 2, y: y - LANE / 2 + 3, width: COLUMN, height: LANE }),
      element("circle", { class: "halo", cx: x, cy: y, r: 10.5 }),
      element("circle", { class: "dot", cx: x, cy: y, r: turn.head ? 6.5 : 5 }),
      ...(node.forks || turn.label || turn.tags.length ? [element("path", { class: "flag", d: `M${x + 5} ${y - 5}v-9l7 3-7 3` })] : []),
      element("text", { class: "weight", x, y: y + 22.5, "aria-hidden": "true" }, short(turn.tokens)),
    ];
    return element("g", {
      class: classes.join(" "), role: "treeitem", tabindex: chosen ? 0 : -1, "data-version": turn.version,
      "aria-selected": String(chosen), "aria-level": node.depth + 1, "aria-label": described(node),
      "aria-posinset": siblings.indexOf(node) + 1, "aria-setsize": siblings.length,
      ...(node.children.length ? { "aria-expanded": "true" } : {}), ...(turn.head ? { "aria-current": "true" } : {}),
    }, ...shapes);
  }

  mark(version) { return version && this.svg.querySelector(`[data-version="${CSS.escape(version)}"]`); }

  /** Scrolls only the strip to a node. The strip has a size only while it is displayed. */
  reveal(version) {
    const node = this.places.nodes.get(version);
    if (!node) return;
    const [x, y] = spot(node);
    const { scrollLeft, clientWidth, scrollTop, clientHeight } = this.scroller;
    if (x < scrollLeft + LEFT || x > scrollLeft + clientWidth - LEFT * 2) this.scroller.scrollLeft = x - clientWidth * 0.7;
    if (y < scrollTop + TOP || y > scrollTop + clientHeight - BOTTOM) this.scroller.scrollTop = y - clientHeight / 2;
  }

  choose(mark) {
    if (!mark) return;
    this.onSelect(mark.dataset.version, false);
    this.mark(this.selected)?.focus({ preventScroll: true });
  }

  key(event) {
    const node = this.places.nodes.get(event.target.closest("[data-version]")?.dataset.version);
    if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.onSelect(node.turn.version, true);
      return;
    }
    const next = this.toward(node, event.key);
    if (!next) return;
    event.preventDefault();
    this.choose(this.mark(next.turn.version));
  }

  /** Returns the node that a key leads to. Left and right move along a branch, up and down to the next branch. */
  toward(node, key) {
    const { all } = this.places;
    const beside = (way) => {
      const others = all.filter((one) => Math.sign(one.lane - node.lane) === way);
      const far = (one) => Math.abs(one.lane - node.lane) * 1e6 + Math.abs(one.depth - node.depth);
      return others.reduce((best, one) => (!best || far(one) < far(best) ? one : best), null);
    };
    switch (key) {
      case "ArrowLeft": return node.parent;
      case "ArrowRight": return node.children.find((child) => child.onPath) ?? node.children[0];
      case "ArrowUp": return beside(-1);
      case "ArrowDown": return beside(1);
      case "Home": return all[0];
      case "End": return all.find((one) => one.turn.head);
      default: return null;
    }
  }
}

function spot(node) { return [LEFT + node.depth * COLUMN, TOP + node.lane * LANE]; }

/** Formats a count so that it fits under a dot. */
function short(tokens) {
  if (tokens < 10_000) return tokens.toLocaleString();
  return tokens < 1e6 ? `${Math.round(tokens / 1000)}k` : `${(tokens / 1e6).toFixed(1)}M`;
}
