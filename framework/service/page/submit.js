/** How to submit a job, and a form for the two files of a saved one. */

import { html, useState } from "./vendor/htm-preact.js";
import { post } from "./api.js";
import { Copyable } from "./parts.js";

async function submit(form) {
  const files = new FormData(form);
  const body = new FormData();
  body.set("request", JSON.stringify(JSON.parse(await files.get("request").text())));
  body.set("bundle", files.get("bundle"));
  return post("jobs", body);
}

export function SubmitView() {
  const [isBusy, setIsBusy] = useState(false);
  const [failure, setFailure] = useState("");
  const [made, setMade] = useState(null);
  const onSubmit = (event) => {
    event.preventDefault();
    setIsBusy(true);
    setFailure("");
    submit(event.target)
      .then((job) => (job.warnings.length ? setMade(job) : (location.hash = `#/jobs/${encodeURIComponent(job.id)}`)))
      .catch((error) =>
        setFailure(error instanceof SyntaxError ? `The request is not JSON: ${error.message}.` : error.message),
      )
      .finally(() => setIsBusy(false));
  };
  if (made) {
    return html`<h1>Submitted</h1>
      ${made.warnings.map((warning) => html`<p class="alert">${warning}</p>`)}
      <p><a href=${`#/jobs/${encodeURIComponent(made.id)}`}>Go to ${made.id}</a></p>`;
  }
  const here = new URL(".", location.href).href.replace(/\/$/, "");
  return html`<h1>Submit a job</h1>
    <section aria-labelledby="commands">
      <h2 id="commands">Where your script is</h2>
      <p>
        Dike reads the script's model before it plans the job, so a job is submitted where Dike is installed and the script
        is. The commands find your token in <code>$DIKE_TOKEN</code>.
      </p>
      <${Copyable} label="A training job" text=${`dike submit --service ${here} train.py`} />
      <${Copyable} label="A search" text=${`dike tune --detach --service ${here} train.py --param lr=0.1,0.01`} />
      <${Copyable} label="From Python" text=${`dike.Client("${here}").submit("train.py")`} />
      <p class="quiet">
        A job of yours that has ended can be submitted again from its own view. The <a href="docs">REST API</a> does
        all that this page does.
      </p>
    </section>
    <section aria-labelledby="files">
      <h2 id="files">From a machine that does not reach this service</h2>
      <p>
        <code>dike submit --save FOLDER train.py</code> writes two files there instead of sending them. Take them to a
        browser that reaches this page, and send them here.
      </p>
      <form class="submit" onSubmit=${onSubmit}>
        <label for="request">Request: request.json, what the job is</label>
        <input id="request" name="request" type="file" accept=".json,application/json" required />
        <label for="bundle">Bundle: bundle.tar.gz, the folder of its script</label>
        <input id="bundle" name="bundle" type="file" accept=".gz,.tgz,application/gzip" required />
        <button class="primary" disabled=${isBusy}>${isBusy ? "Sending …" : "Submit"}</button>
      </form>
      ${failure && html`<p class="alert" role="alert">${failure}</p>`}
    </section>`;
}
