//! Determines the role and the unit of an allocation from its Python frames and from the
//! annotations at that time.

use super::{number, text};
use crate::attribute::{ROOT, normalize};
use crate::pickle::Value;
use shardlab_plan::ir::Role;

/// Annotations in order of time.
pub(super) struct Places {
    /// Starts (`true`) and ends of annotations, by time.
    marks: Vec<(u64, bool, String)>,
    next: usize,
    open: Vec<String>,
    forward: Vec<String>,
    backward: Option<String>,
    /// Number of allocations of the current reduction.
    reducing: u32,
    /// Whether events have frames. Without them, annotations tell forward from backward.
    has_frames: bool,
}

/// Returns whether any event of a history has Python frames.
pub(super) fn has_frames(history: &[Value]) -> bool {
    history.iter().any(|e| !Frames::of(e).0.is_empty())
}

/// Returns whether any annotation names a unit.
pub(super) fn has_units(annotations: &[&Value]) -> bool {
    let unit = |a: &&Value| unit_of(text(a, "name"));
    annotations.iter().any(|a| unit(a).is_some())
}

impl Places {
    pub(super) fn new(annotations: &[&Value], has_frames: bool) -> Self {
        let mark = |a: &&Value| {
            (
                number(a, "time_us"),
                text(a, "stage") == "START",
                text(a, "name").to_owned(),
            )
        };
        let mut marks: Vec<_> = annotations.iter().map(mark).collect();
        marks.sort_by_key(|m| m.0);
        Self {
            marks,
            next: 0,
            open: Vec::new(),
            forward: Vec::new(),
            backward: None,
            reducing: 0,
            has_frames,
        }
    }

    /// Returns the role and the unit of an allocation. Events must be passed in order of time.
    pub(super) fn of(&mut self, event: &Value) -> (&'static str, String) {
        self.advance(number(event, "time_us"));
        let frames = Frames::of(event);
        let named = self.open.iter().rev().find_map(|name| unit_of(name));
        let unit = named.or_else(|| {
            let forward = self.forward.last().cloned();
            match (self.has_frames, frames.is_backward()) {
                (true, true) => self.backward.clone(),
                (true, false) => forward,
                (false, _) => forward.or_else(|| self.backward.clone()),
            }
        });
        let role = self.role(&frames);
        (
            role.name(),
            unit.map_or_else(|| ROOT.to_owned(), |u| normalize(&u)),
        )
    }

    fn advance(&mut self, time: u64) {
        while let Some((at, starts, name)) = self.marks.get(self.next) {
            if *at > time {
                break;
            }
            if *starts {
                let unit = unit_of(name);
                match () {
                    () if name.starts_with("FSDP::pre_forward") => self.forward.extend(unit),
                    () if name.starts_with("FSDP::post_forward") => {
                        if let Some(i) = self.forward.iter().rposition(|u| Some(u) == unit.as_ref())
                        {
                            self.forward.truncate(i);
                        }
                    }
                    () if name.starts_with("FSDP::pre_backward") => self.backward = unit,
                    // The next forward begins, so that of the last backward is over.
                    () if name.starts_with("FSDP::root_pre_forward") => self.backward = None,
                    () if name.starts_with("FSDP::post_backward_reduce") => self.reducing = 0,
                    () => {}
                }
                self.open.push(name.clone());
            } else if let Some(i) = self.open.iter().rposition(|n| n == name) {
                self.open.remove(i);
            }
            self.next += 1;
        }
    }

    fn role(&mut self, frames: &Frames<'_>) -> Role {
        let annotated = |part: &str| self.open.iter().any(|n| n.starts_with(part));
        if frames.any("_fsdp_param.py", "accumulate") || annotated("FSDP::post_backward_accumulate")
        {
            return Role::FullGrad;
        }
        if frames.any("_fsdp_param.py", "") || annotated("FSDP::all_gather_copy_out") {
            return Role::FullWeight;
        }
        if frames.any("_fsdp_collectives.py", "_get_param_all_gather_inputs") {
            return Role::GatherInput;
        }
        if frames.any("_fsdp_collectives.py", "foreach_all_gather") || annotated("FSDP::all_gather")
        {
            return Role::GatherBuffer;
        }
        if frames.any("_fsdp_collectives.py", "foreach_reduce")
            || annotated("FSDP::post_backward_reduce")
        {
            if frames.any("_fsdp_common.py", "_to_dtype_if_needed") {
                return Role::MainGrad;
            }
            // The packed input is allocated first, then the output.
            self.reducing += 1;
            return if self.reducing == 1 {
                Role::ReduceInput
            } else {
                Role::ReduceOutput
            };
        }
        // Outer frames do not count, because the whole forward runs within Megatron-FSDP's module.
        if frames.inner().any("param_and_grad_buffer.py", "") {
            let frames = frames.inner();
            let grad = frames.functions("grad") || frames.functions("reduce");
            return if grad && !frames.functions("all_gather") {
                Role::FullGrad
            } else {
                Role::FullWeight
            };
        }
        if frames.any("/optim/", "") || annotated("Optimizer.step") {
            return Role::OptimizerState;
        }
        if frames.functions("cross_entropy") || frames.functions("Loss") {
            return Role::Logits;
        }
        if frames.is_backward() {
            return Role::Temporary;
        }
        Role::Activation
    }
}

/// Returns the unit that an annotation of FSDP2 names.
fn unit_of(name: &str) -> Option<String> {
    let rest = name.strip_prefix("FSDP::")?;
    if let Some((_, unit)) = rest.split_once(" (") {
        return Some(unit.rsplit_once(')').map_or(unit, |(u, _)| u).to_owned());
    }
    if rest.contains(" for ") || rest.starts_with("cast_forward") || rest.starts_with("inputs_to") {
        return None;
    }
    Some(String::new())
}

/// Python frames of an event, innermost first.
struct Frames<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Frames<'a> {
    fn of(event: &'a Value) -> Self {
        let all = event.get("frames").map_or(&[][..], Value::items);
        let frames = all.iter().map(|f| (text(f, "filename"), text(f, "name")));
        Self(frames.filter(|(file, _)| file.ends_with(".py")).collect())
    }

    fn any(&self, file: &str, function: &str) -> bool {
        self.0
            .iter()
            .any(|(f, n)| f.contains(file) && n.contains(function))
    }

    /// Returns the innermost frames.
    fn inner(&self) -> Self {
        Self(self.0.iter().take(3).copied().collect())
    }

    fn functions(&self, part: &str) -> bool {
        self.0.iter().any(|(_, n)| n.contains(part))
    }

    /// Returns whether the allocation happened in backward. Autograd's threads have no Python
    /// frames except those of hooks.
    fn is_backward(&self) -> bool {
        let hook = |file: &str| {
            file.contains("_fully_shard")
                || file.contains("megatron_fsdp")
                || file.contains("_contextlib")
        };
        self.0.is_empty() || self.0.iter().all(|(f, _)| hook(f))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(time: u64, name: &str, stage: &str) -> Value {
        Value::dict([
            ("time_us", Value::from(time)),
            ("stage", Value::from(stage)),
            ("name", Value::from(name)),
        ])
    }

    fn event(time: u64, frames: &[(&str, &str)]) -> Value {
        let frame = |(file, name): &(&str, &str)| {
            Value::dict([
                ("filename", Value::from(*file)),
                ("name", Value::from(*name)),
            ])
        };
        Value::dict([
            ("time_us", Value::from(time)),
            ("frames", Value::list(frames.iter().map(frame))),
        ])
    }

    /// The frames of gradients that a micro-batch accumulates, as recorded on two H200.
    #[test]
    fn accumulated_gradients_are_no_weights() {
        let mut places = Places::new(&[], true);
        let param = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py";
        let accumulated = event(1, &[(param, "to_accumulated_grad_if_needed")]);
        assert_eq!(places.of(&accumulated).0, Role::FullGrad.name());
        let unsharded = event(2, &[(param, "init_unsharded_param")]);
        assert_eq!(places.of(&unsharded).0, Role::FullWeight.name());
    }

    /// The unit of the last backward ends with the next forward.
    #[test]
    fn a_new_forward_ends_the_last_backward() {
        let all = [
            mark(1, "FSDP::pre_backward (layers.0)", "START"),
            mark(2, "FSDP::pre_backward (layers.0)", "END"),
            mark(5, "FSDP::root_pre_forward", "START"),
            mark(6, "FSDP::root_pre_forward", "END"),
        ];
        let all: Vec<&Value> = all.iter().collect();
        let mut places = Places::new(&all, true);
        assert_eq!(places.of(&event(3, &[])).1, "layers.0");
        assert_eq!(places.of(&event(7, &[])).1, ROOT);
    }
}
