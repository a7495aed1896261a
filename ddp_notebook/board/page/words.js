// Words: marks of roles, spans of time, sizes, rank sets.

/** The states of ranks, each with a mark and a tone. What the kernel knows is finer: a row's text says it. */
export const STATES = {
  ready: ["✓", "ok"],
  running: ["▶", "busy"],
  waiting: ["…", "warn"],
  slow: ["►", "warn"],
  paused: ["‖", "paused"],
  error: ["✗", "bad"],
  ended: ["■", "idle"],
};
const STATE_OF = { culprit: "error", dead: "error", failed: "error", raised: "error", refused: "error", groupless: "error", late: "slow" };

export function lookOf({ role, status, word: own }) {
  // Waiting is worth a word where something is wrong: in a healthy run it would come and go.
  const word = role === "waiting" && own !== "waiting" ? "running" : STATE_OF[role] ?? role;
  const [mark, tone] = STATES[word] ?? ["?", "idle"];
  // Of one that says nothing, the last that is known; in setup, what it does there.
  if (role === "silent" || (word === "running" && status !== "running")) return { mark, word: own || status, tone };
  // One whose collective was refused for what others did has raised, and is not the cause.
  return { mark, word, tone: ["refused", "groupless"].includes(role) ? "warn" : tone };
}

/** The states of the session: a tone, and which tab is shown, until another is chosen. */
export const SESSION = {
  ready: ["ok", "variables"],
  running: ["busy", "output"],
  paused: ["paused", "code"],
  hang: ["bad", "problem"],
  error: ["bad", "problem"],
  "set-up": ["busy", "problem"],
  ended: ["idle", "problem"],
};

export function stateOf({ rows, loading }, findings, stages) {
  const has = (...words) => rows.some(({ role, status }) => words.includes(role) || words.includes(status));
  if (findings.length && !findings[0].passing) return has("waiting", "running", "setting up") ? "hang" : "error";
  if (has("dead", "failed", "raised", "refused", "groupless")) return "error";
  if (loading || has("starting", "setting up") || rows.some((row) => row.role === "paused" && row.stages_passed < stages)) return "set-up";
  return ["ended", "paused", "running", "ready"].find((word) => has(word)) ?? "ended";
}

/** A time span in words, from microseconds: `12 µs`, `3.4 ms`, `1.5 s`, `4 min`. */
export function formatSpan(us) {
  const size = Math.abs(us);
  if (size < 1000) return `${Math.round(us)} µs`;
  if (size < 1e6) return `${trim(us / 1e3)} ms`;
  if (size < 119.5e6) return `${trim(us / 1e6)} s`;
  return size < 7170e6 ? `${Math.round(us / 60e6)} min` : `${Math.round(us / 3600e6)} h`;
}

const trim = (value) => (Math.abs(value) < 9.95 ? value.toFixed(1).replace(".0", "") : value.toFixed(0));

/** A time on the axis, as exact as `step` between two of them asks for. */
export function formatTick(at, step) {
  const [unit, worth] = [["s", 1e6], ["ms", 1e3], ["µs", 1]].find(([, each]) => Math.abs(at) >= each) ?? ["µs", 1];
  const digits = Math.max(0, Math.ceil(Math.log10(worth / step) - 1e-9));
  return at ? `${(at / worth).toFixed(digits)} ${unit}` : "0";
}

/** An age for a glance: a healthy rank's does not flicker. */
export function formatAge(us) {
  if (us < 1e6) return "< 1 s";
  return us < 119.5e6 ? `${Math.round(us / 1e6)} s` : formatSpan(us);
}

export function formatBytes(count) {
  for (const [unit, worth] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= worth) return `${(count / worth).toFixed(1).replace(".0", "")} ${unit}`;
  return `${count} B`;
}

/** The members of a rank set as it is written: `0,2-4`. */
export function parseRanks(text) {
  const ranks = [];
  for (const part of text ? text.split(",") : []) {
    const [first, last] = part.split("-").map(Number);
    for (let rank = first; rank <= (last ?? first); rank++) ranks.push(rank);
  }
  return ranks;
}

/** The inverse of `parseRanks`. */
export function formatRanks(ranks) {
  const runs = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

/** A rank set in a sentence: `rank 1`, `ranks 0, 1 and 3`; a range from three consecutive ranks on. */
export function nameRanks(text) {
  const parts = text.split(",").flatMap((part) => (parseRanks(part).length === 2 ? parseRanks(part) : [part]));
  const last = parts.pop();
  return `rank${/^\d+$/.test(text) ? "" : "s"} ${parts.length ? `${parts.join(", ")} and ${last}` : last}`;
}

/** A magic for chosen ranks; those replace ranks that it names itself. */
export function magicFor(action, chosen) {
  if (!action.takes_ranks || !chosen.size) return action.magic;
  return `${action.magic.replace(/ --ranks \S+/, "")} --ranks ${formatRanks(chosen)}`;
}

/** A text cut to what `fits`, with an ellipsis; nothing where hardly a letter would be left. */
export function cutTo(text, fits) {
  for (let length = text.length - 1; length > 4; length--) if (fits(`${text.slice(0, length)}…`)) return `${text.slice(0, length)}…`;
  return "";
}
