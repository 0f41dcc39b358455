//! Host offload of the flat policies: state that rests in host memory and visits the device when it is used.
//!
//! Bytes move, objects do not: the device buffer keeps its identity and, in a pool, its address from visit to visit (an engine
//! that made new tensors on reload trained weights that nobody read).

use super::builder::NewBuffer;
use super::context::Cx;
use super::flat::Flat;
use crate::ir::{BufferId, CopyKind, EventId, Pool, StreamId};
use crate::program::{Rule, StreamKind};

impl Flat {
    /// Gives what the scenario offloads a host twin, and its device buffer to the host-to-device stream.
    pub(super) fn offload(&mut self, cx: &mut Cx<'_>) {
        let what = cx.scenario.fsdp.offload;
        if !what.any() {
            return;
        }
        let h2d = cx.b.add_stream(StreamKind::H2d, 0);
        let d2h = cx.b.add_stream(StreamKind::D2h, 0);
        self.host = Some((h2d, d2h));
        for state in &mut self.groups {
            let mut leave = Vec::new();
            if what.params {
                leave.extend(state.weight);
            }
            if what.grads {
                leave.extend(state.grad.map(|a| a.buffer));
            }
            if what.optimizer {
                leave.extend(state.main);
                if let Some(m) = &mut state.moments {
                    m.offloaded = true;
                    leave.extend([m.first, m.second]);
                }
            }
            for device in leave {
                let buffer = &mut cx.b.buffers[device.index()];
                buffer.stream = h2d;
                let twin = NewBuffer {
                    role: buffer.role,
                    bytes: buffer.bytes.0,
                    dtype: buffer.dtype,
                    pool: Pool::Host,
                    stream: h2d,
                    unit: buffer.unit,
                    holds: buffer.holds,
                };
                let host = cx.b.buffer(twin);
                self.twins.insert(device, host);
            }
        }
    }

    /// Whether anything rests in host memory.
    pub(crate) fn offloads(&self) -> bool {
        self.host.is_some()
    }

    /// Gives a buffer its device memory and, with `load`, its content. The caller makes the user's stream wait for
    /// [`Flat::visited`].
    pub(crate) fn visit(&self, cx: &mut Cx<'_>, device: BufferId, load: bool) {
        let (Some((h2d, _)), Some(&host)) = (self.host, self.twins.get(&device)) else {
            return;
        };
        cx.b.alloc(Rule::Offload, device);
        if load {
            cx.b.copy(Rule::Offload, CopyKind::H2d, host, device, h2d);
        }
    }

    /// [`Flat::visit`], and `user` waits for it.
    pub(crate) fn visit_for(&self, cx: &mut Cx<'_>, device: BufferId, load: bool, user: StreamId) {
        if let (Some((h2d, _)), true) = (self.host, self.twins.contains_key(&device)) {
            self.visit(cx, device, load);
            cx.b.join(Rule::Offload, h2d, user);
        }
    }

    /// Event after everything brought to the device so far.
    pub(crate) fn visited(&self, cx: &mut Cx<'_>) -> Option<EventId> {
        self.host.map(|(h2d, _)| cx.b.record(Rule::Offload, h2d))
    }

    /// Ends a visit once `last` is done with the buffer; with `store` its content goes back to the host first.
    pub(crate) fn leave(&self, cx: &mut Cx<'_>, device: BufferId, store: bool, last: StreamId) {
        let (Some((h2d, d2h)), Some(&host)) = (self.host, self.twins.get(&device)) else {
            return;
        };
        if store {
            cx.b.join(Rule::Offload, last, d2h);
            cx.b.copy(Rule::Offload, CopyKind::D2h, device, host, d2h);
        }
        cx.b.join(Rule::Offload, if store { d2h } else { last }, h2d);
        cx.b.free(Rule::Offload, device);
    }
}
