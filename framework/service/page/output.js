/** The output of a job's tasks, live. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { getLines, useLive } from "./api.js";
import { Pending } from "./parts.js";

const LINES_KEPT = 5000;
// Terminal colours and cursor movements.
const ESCAPES = /\x1b\[[0-9;?]*[A-Za-z]/g;

/** Appends chunks to lines; a carriage return overwrites its line, as in a terminal. */
export function withChunks(before, chunks) {
  const { lines, open } = before ?? { lines: [], open: {} };
  for (const { task, stream, text } of chunks) {
    const source = `${task} ${stream}`;
    const pieces = text.replace(ESCAPES, "").split("\n");
    pieces.forEach((piece, index) => {
      const isLast = index === pieces.length - 1;
      let line = index === 0 ? open[source] : undefined;
      if (line === undefined && (piece || !isLast)) lines.push((line = { task, text: "" }));
      if (line !== undefined) line.text += piece;
      open[source] = isLast ? line : undefined;
    });
  }
  const number = chunks.at(-1)?.number ?? before?.number ?? 0;
  return { lines: lines.slice(-LINES_KEPT), open, number, cut: (before?.cut ?? false) || lines.length > LINES_KEPT };
}

function lastOverwrite(text) {
  const ended = text.replace(/\r+$/, "");
  return ended.slice(ended.lastIndexOf("\r") + 1);
}

/** The output of a job's tasks or, with a `trial`, of that trial of a search. */
export function Output({ id, trial, active }) {
  const asked = trial === undefined ? {} : { trial };
  const { data, error } = useLive(
    async (before, signal) => {
      const lines = await getLines(`jobs/${encodeURIComponent(id)}/logs`, { ...asked, after: before?.number ?? 0 }, signal);
      const chunks = lines.filter((line) => line.number !== undefined);
      return before !== undefined && !chunks.length ? before : withChunks(before, chunks);
    },
    [id, trial],
    active,
  );
  const [task, setTask] = useState("");
  const [follows, setFollows] = useState(true);
  const box = useRef(null);
  useEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight;
  });
  if (data === undefined) return html`<${Pending} error=${error} />`;
  const tasks = [...new Set(data.lines.map((line) => line.task))].sort();
  const width = Math.max(...tasks.map((name) => name.length), 0);
  const shown = data.lines.filter((line) => !task || line.task === task);
  const prefix = (line) => (tasks.length > 1 && !task ? `${line.task.padEnd(width)} │ ` : "");
  const choose = html`<label>Task
    <select value=${task} onChange=${(event) => setTask(event.target.value)}>
      <option value="">all</option>
      ${tasks.map((name) => html`<option value=${name}>${name}</option>`)}
    </select>
  </label>`;
  return html`<div class="filters">
      ${tasks.length > 1 && choose}
      <label class="check">
        <input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> Follow
      </label>
      ${data.cut && html`<span class="quiet">Only the last ${LINES_KEPT} lines; dike logs shows all.</span>`}
    </div>
    <pre ref=${box} class=${shown.length ? "output" : "output empty"} tabindex="0" role="log" aria-label=${trial === undefined ? "output of the job's tasks" : `output of trial ${trial}`}>${
      shown.length ? shown.map((line) => prefix(line) + lastOverwrite(line.text)).join("\n") : active ? "nothing yet" : "no output"
    }</pre>`;
}
