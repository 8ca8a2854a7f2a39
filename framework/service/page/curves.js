/** Curves over steps, drawn by uPlot. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { figure } from "./format.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const HEIGHT = 260;
const DECADES_FOR_LOG = 1.3;
const MAX_NAMED = 3;
const ROWS = 12;

function valueOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Whether values span enough decades for a logarithmic scale. */
export function suitsLog(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return false;
  const [least, greatest] = known.reduce(
    ([low, high], value) => [Math.min(low, value), Math.max(high, value)],
    [Infinity, -Infinity],
  );
  return least > 0 && Math.log10(greatest / least) > DECADES_FOR_LOG;
}

function options(width, series, isLog, onFocus) {
  const axis = {
    stroke: () => valueOf("--quiet"),
    grid: { stroke: () => valueOf("--line"), width: 1 },
    ticks: { stroke: () => valueOf("--line"), width: 1 },
  };
  const isMany = series.length > MAX_NAMED;
  return {
    width,
    height: HEIGHT,
    legend: { show: !isMany },
    cursor: { drag: { x: true, y: false }, focus: { prox: isMany ? 24 : -1 } },
    focus: { alpha: 0.2 },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [
      { ...axis, size: 34 },
      { ...axis, size: 70, values: (_, splits) => splits.map((value) => (value === null ? "" : figure(value))) },
    ],
    series: [
      { label: "step" },
      ...series.map((one) => ({
        label: one.label,
        stroke: () => valueOf(one.colour),
        dash: one.dash,
        width: one.width ?? 1.5,
        spanGaps: true,
        points: { show: one.isShort },
        value: (_, value) => figure(value),
      })),
    ],
    hooks: { setSeries: [(_, index) => onFocus?.(index === null ? null : index - 1)] },
  };
}

/** Some evenly spaced values of the curves as a table, for screen readers. */
function Values({ data, series }) {
  const [steps, ...rows] = data;
  const count = Math.min(ROWS, steps.length);
  const chosen = Array.from({ length: count }, (_, row) =>
    count < 2 ? 0 : Math.round((row * (steps.length - 1)) / (count - 1)),
  );
  return html`<details class="values"><summary>As a table</summary>
    <div class="scroll"><table>
      <thead><tr>
        <th scope="col" class="number">Step</th>
        ${series.map((one) => html`<th scope="col" class="number">${one.label}</th>`)}
      </tr></thead>
      <tbody>
        ${chosen.map(
          (at) => html`<tr key=${at}>
          <th scope="row" class="number">${figure(steps[at])}</th>
          ${rows.map((row) => html`<td class="number">${figure(row[at])}</td>`)}
        </tr>`,
        )}
      </tbody>
    </table></div>
  </details>`;
}

/**
 * A figure with one or more curves.
 *
 * `data` is [steps, values of the first series, ...]; `series` has label, colour (a CSS variable) and dash of each.
 * `summary` describes the figure in words. `focus` is the index of the highlighted series, or null; `onFocus` receives
 * the one that is pointed at. Unless `isLinear`, the user can choose a logarithmic scale, the default if it suits the
 * values. Few curves also show their values as a table.
 */
export function Curves({ title, summary, data, series, focus = null, onFocus, isLinear = false }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [choice, setChoice] = useState(null);
  const isLog = !isLinear && (choice ?? suitsLog(data.slice(1).flat()));
  const shape = JSON.stringify([series, isLog]);
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(box.current.clientWidth, series, isLog, onFocus), data, box.current);
    };
    make();
    const sizes = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    sizes.observe(box.current);
    DARK.addEventListener("change", make);
    return () => {
      sizes.disconnect();
      DARK.removeEventListener("change", make);
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current.setData(data), [data]);
  useEffect(() => {
    // false: without calling the hook, which would set the focus again.
    plot.current.setSeries(focus === null ? null : focus + 1, { focus: focus !== null }, false);
  }, [focus]);
  return html`<figure class="curves" data-points=${data[0].length}>
    <figcaption>${title}
      ${
        !isLinear &&
        html`<label class="check">
          <input type="checkbox" checked=${isLog} onChange=${(event) => setChoice(event.target.checked)} /> log scale
        </label>`
      }
    </figcaption>
    <div ref=${box} role="img" aria-label=${summary}></div>
    ${series.length <= MAX_NAMED && html`<${Values} data=${data} series=${series} />`}
  </figure>`;
}
