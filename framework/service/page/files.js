/** The files that a job's script has written. */

import { html, useState } from "./vendor/htm-preact.js";
import { get, getBlob, useLive } from "./api.js";
import { Ago, bytes } from "./format.js";
import { Pending } from "./parts.js";

const SHOWN = 200;
const LARGE_BYTES = 64 * 2 ** 20;

/** Downloads a file through memory, as a plain link would lack the token. */
async function save(id, path) {
  const blob = await getBlob(`jobs/${encodeURIComponent(id)}/outputs/content`, { path });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = path.slice(path.lastIndexOf("/") + 1);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** Loads the whole list when first shown, on `Refresh`, and once more at the job's end. */
export function Files({ id, active }) {
  const [asked, setAsked] = useState(0);
  return html`<${List} id=${id} active=${active} asked=${asked} />
    ${active && html`<button onClick=${() => setAsked(asked + 1)}>Refresh</button>`}`;
}

function List({ id, active, asked }) {
  const load = (_, signal) => get(`jobs/${encodeURIComponent(id)}/outputs`, {}, signal);
  const { data, error } = useLive(load, [id, active, asked], false);
  const [failure, setFailure] = useState("");
  if (data === undefined) return html`<${Pending} error=${error} />`;
  const left = Object.entries(data.left_behind);
  const fetched = (file) => html`<button
    class="plain" onClick=${() => save(id, file.path).catch((failed) => setFailure(failed.message))}>${file.path}</button>`;
  const row = (file) => html`<tr key=${file.path}>
    <th scope="row">${file.size_bytes > LARGE_BYTES ? file.path : fetched(file)}</th>
    <td class="number">${bytes(file.size_bytes)}</td>
    <td><${Ago} at=${file.modified_s} /></td>
  </tr>`;
  const table = html`<div class="scroll"><table class="files">
    <thead><tr><th scope="col">File</th><th scope="col" class="number">Size</th><th scope="col">Written</th></tr></thead>
    <tbody>${data.files.slice(0, SHOWN).map(row)}</tbody>
  </table></div>`;
  const large = `Files of more than ${bytes(LARGE_BYTES)}: dike outputs ${id} -o FOLDER`;
  return html`${data.files.length ? table : html`<p class="quiet">${data.unreachable || "It has written none."}</p>`}
    ${data.files.length > SHOWN && html`<p class="quiet">${data.files.length - SHOWN} more: dike outputs shows them</p>`}
    ${data.files.some((file) => file.size_bytes > LARGE_BYTES) && html`<p class="quiet">${large}</p>`}
    ${left.length > 0 && html`<p>Left behind:</p><ul>${left.map(([path, why]) => html`<li>${path}: ${why}</li>`)}</ul>`}
    ${failure && html`<p class="alert" role="alert">${failure}</p>`}`;
}
