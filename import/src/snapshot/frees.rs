//! Which events of a history free memory.

use super::text;
use crate::pickle::Value;

const REQUESTED: &str = "free_requested";
const COMPLETED: &str = "free_completed";

/// The actions that free memory. A free has two events: one when the program frees the memory, and
/// one when no stream uses it any longer. `_record_memory_history(skip_actions=…)` leaves one of
/// them out, so that the other one stands for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frees {
    requested: &'static str,
    completed: &'static str,
}

impl Frees {
    /// Returns the actions of a history.
    pub(super) fn of(history: &[Value]) -> Self {
        let has = |action: &str| history.iter().any(|e| text(e, "action") == action);
        match (has(REQUESTED), has(COMPLETED)) {
            (false, true) => Self {
                requested: COMPLETED,
                completed: COMPLETED,
            },
            (true, false) => Self {
                requested: REQUESTED,
                completed: REQUESTED,
            },
            _ => Self {
                requested: REQUESTED,
                completed: COMPLETED,
            },
        }
    }

    /// Returns whether an action says that the program freed memory. PyTorch before 2.0 has one
    /// event per free.
    pub(super) fn requests(self, action: &str) -> bool {
        action == self.requested || action == "free"
    }

    /// Returns whether an action says that memory is available again.
    pub(super) fn completes(self, action: &str) -> bool {
        action == self.completed || action == "free"
    }

    /// Returns a note if one of the actions was not recorded.
    pub(super) fn note(self) -> Option<String> {
        let text = match (self.requested, self.completed) {
            (REQUESTED, COMPLETED) => return None,
            (REQUESTED, _) => {
                "the history lacks `free_completed` (skip_actions): memory counts as available when its free is requested, also if another stream still uses it"
            }
            _ => {
                "the history lacks `free_requested` (skip_actions): memory counts as allocated until its free completes"
            }
        };
        Some(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use crate::pickle::{self, Value};
    use crate::snapshot::{OfLine, SnapshotOptions, SnapshotReport, read};
    use serde_json::json;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    /// Allocates and frees 4 MiB five times, at two addresses in turn, without some events.
    fn report(without: &str) -> SnapshotReport {
        let mut events = vec![
            json!({"action": "segment_alloc", "addr": 64 * MIB, "size": 20 * MIB, "stream": 0}),
        ];
        for i in 0..5_u64 {
            let of = |action: &str| json!({"action": action, "addr": (64 + 4 * (i % 2)) * MIB, "size": 4 * MIB, "stream": 0});
            events.extend(["alloc", "free_requested", "free_completed"].map(of));
        }
        events.retain(|e| e["action"] != without);
        let snapshot = json!({
            "segments": [{
                "device": 0, "address": 64 * MIB, "total_size": 20 * MIB, "stream": 0,
                "segment_type": "large",
                "blocks": [{"address": 64 * MIB, "size": 20 * MIB, "state": "inactive"}],
            }],
            "device_traces": [events],
        });
        let bytes = pickle::write(&Value::from_json(&snapshot));
        let read = read(&bytes[..], Path::new("s"), &SnapshotOptions::default());
        read.unwrap().remove(0)
    }

    /// A step allocates 4 MiB and frees it, and another line keeps 6 MiB in two parts.
    #[test]
    fn memory_that_is_kept_has_a_line() {
        let at = |line: u32| {
            json!([
                {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "f"},
                {"filename": "/home/u/job/leak.py", "line": line, "name": "leaky"},
                {"filename": "/home/u/job/train.py", "line": 70, "name": "step"},
            ])
        };
        let event = |action: &str, mib: u64, size: u64, line: u32| json!({"action": action, "addr": mib * MIB, "size": size * MIB, "stream": 0, "frames": at(line)});
        let events = vec![
            event("segment_alloc", 64, 20, 3),
            event("alloc", 64, 4, 9),
            event("alloc", 68, 2, 12),
            event("free_requested", 64, 4, 9),
            event("free_completed", 64, 4, 9),
            event("alloc", 70, 4, 12),
        ];
        let block = |mib: u64, size: u64, state: &str| json!({"address": mib * MIB, "size": size * MIB, "requested_size": size * MIB, "state": state});
        let snapshot = json!({
            "segments": [{
                "device": 0, "address": 64 * MIB, "total_size": 20 * MIB, "stream": 0,
                "segment_type": "large",
                "blocks": [
                    block(64, 4, "inactive"), block(68, 2, "active_allocated"),
                    block(70, 4, "active_allocated"), block(74, 10, "inactive"),
                ],
            }],
            "device_traces": [events],
        });
        let bytes = pickle::write(&Value::from_json(&snapshot));
        let read = read(&bytes[..], Path::new("s"), &SnapshotOptions::default());
        let kept = &read.unwrap()[0].end_by_line;
        let expected = OfLine {
            line: "leak.py:12".into(),
            bytes: 6 * MIB,
            allocations: 2,
        };
        assert_eq!(kept, &[expected]);
    }

    #[test]
    fn one_of_the_events_of_a_free_is_enough() {
        for (without, note) in [
            ("", None),
            ("free_requested", Some("until its free completes")),
            ("free_completed", Some("when its free is requested")),
        ] {
            let found = report(without);
            assert_eq!(found.peak_allocated_bytes, 4 * MIB, "{without}");
            assert_eq!(found.before_bytes, 0, "{without}");
            let changes: Vec<u64> = found.changes.iter().map(|c| c.allocated / MIB).collect();
            assert_eq!(changes, [4, 0].repeat(5), "{without}");
            let notes = found.notes.iter().filter(|n| n.contains("skip_actions"));
            let notes: Vec<&String> = notes.collect();
            assert_eq!(notes.len(), usize::from(note.is_some()), "{notes:?}");
            assert!(notes.iter().all(|n| n.contains(note.unwrap_or_default())));
        }
    }
}
