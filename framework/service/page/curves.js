/** Curves over steps, drawn by uPlot. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { figure } from "./format.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const HEIGHT = 260;
const DECADES_FOR_LOG = 1.3;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Whether a series spans so much that it is read better by orders of magnitude. */
function suitsLog(rows) {
  const values = rows.flat().filter((value) => value !== null && value !== undefined);
  if (!values.length) return false;
  const [least, greatest] = values.reduce(
    ([low, high], value) => [Math.min(low, value), Math.max(high, value)],
    [Infinity, -Infinity],
  );
  return least > 0 && Math.log10(greatest / least) > DECADES_FOR_LOG;
}

function options(width, series, isLog, onFocus) {
  const axis = {
    stroke: () => colour("--quiet"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
  };
  const isMany = series.length > 2;
  return {
    width,
    height: HEIGHT,
    legend: { show: !isMany },
    cursor: { drag: { x: true, y: false }, focus: { prox: isMany ? 24 : -1 } },
    focus: { alpha: 0.25 },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [
      { ...axis, size: 34 },
      { ...axis, size: 70, values: (_, splits) => splits.map((value) => (value === null ? "" : figure(value))) },
    ],
    series: [
      { label: "step" },
      ...series.map((one) => ({
        label: one.label,
        stroke: one.stroke,
        width: one.width ?? 1.5,
        spanGaps: true,
        points: { show: one.isShort },
      })),
    ],
    hooks: { setSeries: [(_, index) => onFocus?.(index === null ? null : index - 1)] },
  };
}

/**
 * A figure with one or more curves.
 *
 * `data` is [steps, values of the first series, ...]; `series` has a label and a colour for each. `summary` says in
 * words what is to be seen. `onFocus` gets the number of the series that is pointed at, or null. Unless `isLinear`, the
 * scale can be logarithmic, and is from the beginning where that suits the values.
 */
export function Curves({ title, summary, data, series, onFocus, isLinear = false }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [choice, setChoice] = useState(null);
  const isLog = !isLinear && (choice ?? suitsLog(data.slice(1)));
  const shape = JSON.stringify([series.map((one) => [one.label, one.stroke, one.width, one.isShort]), isLog]);
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
  </figure>`;
}
