"""What a trial's process tells its executor: one JSON object a line, written to `TrialSpec.report_fd`.

    {"type": "started"}                                  the script is about to run
    {"type": "restored", "path": p, "step": n}           a checkpoint has been restored
    {"type": "training", "preemptible": true, "batch_size": n}
                                                         the first step is about to be taken; whether a request to
                                                         suspend will be obeyed; samples of a step, where that is known
    {"type": "progress", "step": n, "train_s": t, "loss": x, "low": x, "high": x, "last": x, "count": k,
     "metrics": {name: x}, "value": x, "values": [[n, x], ...]}
                                                         a stretch of training, see below
    {"type": "checkpoint", "path": p, "step": n, "train_s": t}
    {"type": "result", "value": x, "values": {...}}      what the function given to `dike.tune` returned
    {"type": "bad_input", "message": "one sentence"}     the process ends with EXIT_BAD_INPUT; a retry would not help
    {"type": "failed", "message": "ValueError: ..."}     the script ended with an exception
    {"type": "suspended", "path": p, "step": n}          the last line of a run that ends with EXIT_SUSPENDED

In `progress`: `step` counts the steps of all runs of the trial; `train_s` the seconds it has trained in all runs;
`loss`, `low`, `high`, `last` and `count` describe the training losses since the last such line (mean, least, greatest,
newest, number) and are absent where there were none; `metrics` are the newest values of everything else by name, an
epoch's results among them; `value` is the objective's newest value where there is one (`logs` at the end of a Keras
epoch, the metric in `dike.report`, the mean of a session's last losses), absent until then; `values`, in a search that
stops trials, are all that were stated since the last such line, each with its step. How many losses a line
describes is a matter of time, and so is their mean; `last` and `value` are not. A number that JSON cannot hold is
written as text: "nan", "inf", "-inf".
"""
