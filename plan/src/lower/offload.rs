//! Host offload of the flat policies: state is kept in host memory, and fetched to the device for
//! each use.
//!
//! The device buffer keeps its identity across fetches and, in a pool, its address. (An engine that
//! created new tensors on reload would train weights that nothing reads.)

use super::builder::NewBuffer;
use super::emitter::Emitter;
use super::flat::Flat;
use crate::ir::{BufferId, CopyKind, EventId, Pool, StreamId};
use crate::program::{Rule, StreamKind};

impl Flat {
    /// Adds a host buffer for all state that the scenario offloads, and makes the host-to-device
    /// stream the owner of its device buffer.
    pub(super) fn offload(&mut self, out: &mut Emitter<'_>) {
        let what = out.inputs.scenario.fsdp.offload;
        if !what.any() {
            return;
        }
        let h2d = out.b.add_stream(StreamKind::H2d, 0);
        let d2h = out.b.add_stream(StreamKind::D2h, 0);
        self.host = Some((h2d, d2h));
        for (state, group) in self.groups.iter_mut().zip(&out.inputs.groups) {
            if group.router_biases {
                // All ranks have router biases, so no gather would fetch them, and offloading them
                // would save almost nothing.
                continue;
            }
            let mut offloaded = Vec::new();
            if what.params {
                offloaded.extend(state.weight);
            }
            if what.grads {
                offloaded.extend(state.grad.map(|a| a.buffer));
            }
            if what.optimizer {
                offloaded.extend(state.main);
                for m in state.tensors.iter_mut().filter_map(|t| t.moments.as_mut()) {
                    m.offloaded = true;
                    offloaded.extend(m.buffers());
                }
            }
            for device in offloaded {
                let buffer = &mut out.b.program_mut().buffers[device.index()];
                buffer.stream = h2d;
                let new = NewBuffer {
                    role: buffer.role,
                    bytes: buffer.bytes.0,
                    dtype: buffer.dtype,
                    pool: Pool::Host,
                    stream: h2d,
                    unit: buffer.unit,
                    holds: buffer.holds,
                };
                let host = out.b.buffer(new);
                self.host_copies.insert(device, host);
            }
        }
    }

    /// Returns whether any state is offloaded.
    pub(crate) fn offloads(&self) -> bool {
        self.host.is_some()
    }

    /// Allocates an offloaded buffer on the device and, with `load`, copies its content. The caller
    /// makes the stream that uses it wait for [`Flat::fetch_issued`].
    pub(crate) fn start_fetch(&self, out: &mut Emitter<'_>, device: BufferId, load: bool) {
        let (Some((h2d, _)), Some(&host)) = (self.host, self.host_copies.get(&device)) else {
            return;
        };
        out.b.alloc(Rule::Offload, device);
        if load {
            out.b.copy(Rule::Offload, CopyKind::H2d, host, device, h2d);
        }
    }

    /// Fetches an offloaded buffer to the device and makes `user` wait for it.
    pub(crate) fn fetch_to_device(
        &self,
        out: &mut Emitter<'_>,
        device: BufferId,
        load: bool,
        user: StreamId,
    ) {
        if let (Some((h2d, _)), true) = (self.host, self.host_copies.contains_key(&device)) {
            self.start_fetch(out, device, load);
            out.b.join(Rule::Offload, h2d, user);
        }
    }

    /// Records an event after all fetches to the device so far.
    pub(crate) fn fetch_issued(&self, out: &mut Emitter<'_>) -> Option<EventId> {
        self.host.map(|(h2d, _)| out.b.record(Rule::Offload, h2d))
    }

    /// Frees an offloaded buffer on the device after `last` has used it. With `store`, copies its
    /// content back to the host first.
    pub(crate) fn evict_to_host(
        &self,
        out: &mut Emitter<'_>,
        device: BufferId,
        store: bool,
        last: StreamId,
    ) {
        let (Some((h2d, d2h)), Some(&host)) = (self.host, self.host_copies.get(&device)) else {
            return;
        };
        if store {
            out.b.join(Rule::Offload, last, d2h);
            out.b.copy(Rule::Offload, CopyKind::D2h, device, host, d2h);
        }
        out.b
            .join(Rule::Offload, if store { d2h } else { last }, h2d);
        out.b.free(Rule::Offload, device);
    }
}
