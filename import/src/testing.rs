//! A small trace for tests: two steps of two units, with every kind of event.

use std::fmt::Write;

/// Writes events with a clock.
#[derive(Default)]
pub(crate) struct Script {
    events: String,
    clock: u32,
    next: u32,
}

impl Script {
    fn event(&mut self, text: &str) {
        if !self.events.is_empty() {
            self.events.push_str(",\n  ");
        }
        self.events.push_str(text);
    }

    fn host(&mut self, cat: &str, name: &str, tid: u32, start: u32, dur: u32, args: &str) -> u32 {
        self.next += 1;
        let id = self.next;
        let args = if args.is_empty() {
            String::new()
        } else {
            format!(", {args}")
        };
        self.event(&format!(
            r#"{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": {tid}, "ts": {start}.250, "dur": {dur}.5, "args": {{"External id": {id}{args}}}}}"#
        ));
        id
    }

    fn kernel(
        &mut self,
        (name, stream): (&str, u32),
        id: u32,
        tid: u32,
        at: u32,
        dur: u32,
        args: &str,
    ) {
        self.next += 1;
        let correlation = self.next + 10_000;
        let args = if args.is_empty() {
            String::new()
        } else {
            format!(", {args}")
        };
        self.event(&format!(
            r#"{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": {tid}, "ts": {at}.3, "dur": 1, "args": {{"correlation": {correlation}}}}}"#
        ));
        let start = at + 10;
        self.event(&format!(
            r#"{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream}, "ts": {start}, "dur": {dur}, "args": {{"External id": {id}, "correlation": {correlation}, "stream": {stream}, "device": 0{args}}}}}"#
        ));
    }

    fn op(&mut self, name: &str, kernel: &str, tid: u32, args: &str) {
        let at = self.clock;
        self.clock += 20;
        let id = self.host("cpu_op", name, tid, at, 15, args);
        self.kernel((kernel, 7), id, tid, at + 1, 8, "");
    }

    fn collective(&mut self, name: &str, kernel: &str, tid: u32, elements: u32) {
        let at = self.clock;
        self.clock += 20;
        let args = format!(
            r#""Collective name": "{name}", "In msg nelems": {}, "Out msg nelems": {elements}, "Group size": 2, "dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1]""#,
            elements / 2
        );
        let id = self.host("cpu_op", "record_param_comms", tid, at, 15, &args);
        self.kernel((kernel, 20), id, tid, at + 1, 12, &args);
    }

    fn around(&mut self, name: &str, tid: u32, inner: impl FnOnce(&mut Self)) {
        let from = self.clock;
        self.clock += 2;
        inner(self);
        self.clock += 2;
        let dur = self.clock - from - 1;
        self.host("user_annotation", name, tid, from, dur, "");
    }

    fn step(&mut self, first: u32) {
        for unit in ["layers.0", "layers.1"] {
            self.around(&format!("FSDP::pre_forward ({unit})"), 1, |s| {
                s.around(&format!("FSDP::all_gather ({unit})"), 1, |s| {
                    s.collective(
                        "_allgather_base",
                        "ncclDevKernel_AllGather_RING_LL(x)",
                        1,
                        128,
                    );
                });
            });
            let number = first + u32::from(unit.ends_with('1'));
            self.op("aten::mm", "nvjet_sm90_tst", 1, &format!(r#""Sequence number": {number}, "Fwd thread id": 0, "Input Dims": [[4, 8], [8, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]"#));
            self.around(&format!("FSDP::post_forward ({unit})"), 1, |_| {});
        }
        for unit in ["layers.1", "layers.0"] {
            self.around(&format!("FSDP::pre_backward ({unit})"), 2, |s| {
                s.around(&format!("FSDP::all_gather ({unit})"), 2, |s| {
                    s.collective(
                        "_allgather_base",
                        "ncclDevKernel_AllGather_RING_LL(x)",
                        2,
                        128,
                    );
                });
            });
            let number = first + u32::from(unit.ends_with('1'));
            let from = self.clock;
            self.host(
                "cpu_op",
                "autograd::engine::evaluate_function: MmBackward0",
                2,
                from,
                44,
                &format!(r#""Sequence number": {number}, "Fwd thread id": 1"#),
            );
            self.clock += 1;
            self.op("aten::mm", "nvjet_sm90_tst", 2, "");
            self.op("aten::mm", "nvjet_sm90_tst", 2, "");
            self.clock += 5;
            self.around(&format!("FSDP::post_backward_reduce ({unit})"), 2, |s| {
                s.collective(
                    "_reduce_scatter_base",
                    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)",
                    2,
                    128,
                );
            });
        }
        self.around("Optimizer.step#AdamW.step", 1, |s| {
            s.op(
                "aten::_fused_adamw_",
                "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
                1,
                "",
            );
        });
    }
}

/// Returns the text of the trace.
pub(crate) fn trace() -> String {
    let mut s = Script::default();
    s.step(10);
    s.step(20);
    let at = s.clock;
    s.event(&format!(r#"{{"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 7, "ts": {at}, "dur": 500}}"#));
    s.event(
        r#"{"ph": "X", "cat": "of_tomorrow", "name": "x", "pid": 0, "tid": 7, "ts": 1, "dur": 5}"#,
    );
    s.event(r#"{"ph": "Q", "name": "y"}"#);
    s.event(r#"{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 5, "args": {"Total Reserved": 2048, "Total Allocated": 1024, "Bytes": 512, "Addr": 77, "Device Type": 1, "Device Id": 0}}"#);
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "{{\"schemaVersion\": 1, \"distributedInfo\": {{\"rank\": 0, \"world_size\": 2}}, \"deviceProperties\": [{{\"name\": \"NVIDIA H100\", \"totalGlobalMem\": 100}}], \"record_shapes\": 1, \"traceEvents\": [\n  {}\n], \"traceName\": \"t\"}}",
        s.events
    );
    text
}
