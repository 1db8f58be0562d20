"""What the parts of an iteration cost on a device.

`table.LatencyTable` answers for one model, dtype and parallel degree. It is made of `step_curve` (latency by tokens,
with its steps) and `surface` (latency by two counts, for attention). `compiled` is the same table unrolled for speed,
`file` keeps one as JSON.

Where the figures come from: `silicon` reads tables that others measured and `silicon_table` makes a `LatencyTable` of
them; `measure` times linear layers on the device here, at the token counts that `sampling` picks. `sweep` is measured
latency by token count, the form in which all of them hand it on.
"""
