//! Execution traces (`ExecutionTraceObserver`): every operator with its shapes, without times.
//!
//! An execution trace is converted to a [`Trace`] whose times are positions, so that the same rules
//! find units, steps and options. Operators that matter for these rules get device work.

use crate::ImportError;
use crate::kineto::{
    Collective, CollectiveCall, DeviceEvent, DeviceKind, HostEvent, Inputs, Recorder, Trace,
};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

#[derive(Deserialize)]
struct File {
    schema: String,
    #[serde(default)]
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
#[serde(from = "Written")]
struct Node {
    id: u64,
    name: String,
    ctrl_deps: u64,
    inputs: Ports,
    outputs: Ports,
    attrs: Vec<Attribute>,
}

/// A node as it is written. Before schema 1.1, the values, shapes and types of operands are
/// separate lists, and the attributes are fields of the node (`ExecutionTraceObserver` of PyTorch
/// up to 2.2).
#[derive(Deserialize)]
struct Written {
    id: u64,
    #[serde(default)]
    name: String,
    #[serde(default, alias = "parent")]
    ctrl_deps: u64,
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    outputs: Value,
    #[serde(default)]
    attrs: Vec<Attribute>,
    #[serde(default)]
    input_shapes: Value,
    #[serde(default)]
    input_types: Value,
    #[serde(default)]
    output_shapes: Value,
    #[serde(default)]
    output_types: Value,
    seq_id: Option<i64>,
    scope: Option<i64>,
    tid: Option<i64>,
    fw_tid: Option<i64>,
}

impl From<Written> for Node {
    fn from(written: Written) -> Self {
        let attributes = [
            ("seq_id", written.seq_id),
            ("scope", written.scope),
            ("tid", written.tid),
            ("fw_tid", written.fw_tid),
        ];
        let mut attrs = written.attrs;
        for (name, value) in attributes {
            attrs.extend(value.map(|value| Attribute {
                name: name.to_owned(),
                value: value.into(),
            }));
        }
        Self {
            id: written.id,
            name: written.name,
            ctrl_deps: written.ctrl_deps,
            inputs: Ports::of(written.inputs, written.input_shapes, written.input_types),
            outputs: Ports::of(written.outputs, written.output_shapes, written.output_types),
            attrs,
        }
    }
}

struct Ports {
    values: Value,
    shapes: Value,
    types: Value,
}

impl Ports {
    /// Returns operands of one object, or of three lists.
    fn of(mut values: Value, shapes: Value, types: Value) -> Self {
        match values.as_object_mut() {
            Some(of) => {
                let mut take = |name| of.remove(name).unwrap_or_default();
                Self {
                    values: take("values"),
                    shapes: take("shapes"),
                    types: take("types"),
                }
            }
            None => Self {
                values,
                shapes,
                types,
            },
        }
    }
}

#[derive(Deserialize)]
struct Attribute {
    name: String,
    #[serde(default)]
    value: Value,
}

impl Node {
    fn attribute(&self, name: &str) -> Option<&Value> {
        self.attrs.iter().find(|a| a.name == name).map(|a| &a.value)
    }

    fn integer(&self, name: &str) -> Option<i64> {
        self.attribute(name)?.as_i64()
    }
}

/// Distance between the positions of two operators; device work is between them.
const STEP: i64 = 1000;

/// Reads an execution trace.
///
/// # Errors
/// Fails if the file is not an execution trace, or has no operators.
pub(crate) fn read(from: impl Read, path: &Path) -> Result<Trace, ImportError> {
    let file: File = serde_json::from_reader(std::io::BufReader::with_capacity(1 << 20, from))
        .map_err(|e| ImportError::invalid(path, e.to_string()))?;
    let mut nodes = file.nodes;
    // Nodes are listed in the order of their ends; ids follow the order of their starts.
    nodes.sort_by_key(|n| n.id);
    let last = last_positions(&nodes);
    let mut reader = Reader::default();
    for (i, node) in nodes.iter().enumerate() {
        if !node.name.starts_with("[pytorch|") && !node.name.is_empty() {
            reader.add(i, node, last[i]);
        }
    }
    let mut trace = reader.trace;
    if trace.host.is_empty() {
        return Err(ImportError::invalid(
            path,
            format!(
                "the execution trace (schema {}) has no operators",
                file.schema
            ),
        ));
    }
    trace.head.shapes = true;
    trace.head.recorder = Recorder::Observer;
    trace.host.sort_by_key(|e| (e.thread, e.start, -e.end));
    trace
        .notes
        .push("execution traces have no times: only structure is known".into());
    Ok(trace)
}

/// Returns the last position within each node.
fn last_positions(nodes: &[Node]) -> Vec<usize> {
    let index: HashMap<u64, usize> = nodes.iter().enumerate().map(|(i, n)| (n.id, i)).collect();
    let mut last: Vec<usize> = (0..nodes.len()).collect();
    for i in (0..nodes.len()).rev() {
        if let Some(&parent) = index.get(&nodes[i].ctrl_deps).filter(|p| **p < i) {
            last[parent] = last[parent].max(last[i]);
        }
    }
    last
}

/// A trace while nodes are added to it.
#[derive(Default)]
struct Reader {
    trace: Trace,
    /// Threads by their ids in the file.
    threads: HashMap<i64, u32>,
    collectives: HashMap<Collective, u32>,
}

impl Reader {
    /// Adds the node at a position. `last` is the last position within it.
    fn add(&mut self, position: usize, node: &Node, last: usize) {
        let tid = node.integer("tid").unwrap_or(0);
        let next = self.threads.len() as u32;
        let thread = *self.threads.entry(tid).or_insert_with(|| {
            self.trace.threads.push(("0".into(), tid.to_string()));
            next
        });
        let at = position as i64 * STEP;
        let external = u32::try_from(position).ok();
        self.add_inputs(node);
        let trace = &mut self.trace;
        trace.host.push(HostEvent {
            start: at,
            end: last as i64 * STEP + STEP - 1,
            name: trace.names.id(&node.name),
            thread,
            is_annotation: node.integer("scope") == Some(7),
            external,
            sequence: node.integer("seq_id").and_then(|s| u32::try_from(s).ok()),
            forward_thread: node
                .integer("fw_tid")
                .and_then(|t| u32::try_from(t).ok())
                .unwrap_or(0),
            inputs: Some(trace.inputs.len() as u32 - 1),
        });
        trace.events += 1;
        if node.name.starts_with("## process_group:init") {
            groups(trace, &node.inputs.values);
        }
        if let Some(collective) = collective(node) {
            self.add_call(collective, at, thread, external);
        } else if let Some(kernel) = kernel(&node.name, &node.outputs) {
            work(trace, at, external, kernel, None);
        }
    }

    fn add_inputs(&mut self, node: &Node) {
        let values = &node.inputs.values;
        let text = match values.is_null() {
            true => "[]".to_owned(),
            false => values.to_string(),
        };
        let names = &mut self.trace.names;
        self.trace.inputs.push(Inputs {
            dims: names.id(&tensors(&node.inputs.shapes)),
            types: names.id(&types(&node.inputs.types)),
            concrete: names.id(&concrete(&text)),
        });
    }

    /// Adds the call of a collective and, unless it is a wait, its work on the device.
    fn add_call(&mut self, of: Collective, at: i64, thread: u32, external: Option<u32>) {
        let trace = &mut self.trace;
        let next = trace.collectives.len() as u32;
        let collective = *self.collectives.entry(of).or_insert_with_key(|c| {
            trace.collectives.push(c.clone());
            next
        });
        trace.calls.push(CollectiveCall {
            start: at,
            thread,
            external,
            collective,
        });
        let name = &trace.collectives[collective as usize].name;
        if name != "wait" {
            let name = format!("nccl {name}");
            work(trace, at, external, &name, Some(collective));
        }
    }
}

fn work(trace: &mut Trace, at: i64, external: Option<u32>, name: &str, collective: Option<u32>) {
    trace.device.push(DeviceEvent {
        start: at + 1,
        end: at + 2,
        name: trace.names.id(name),
        kind: DeviceKind::Kernel,
        device: 0,
        stream: if collective.is_some() { 1 } else { 0 },
        correlation: None,
        external,
        bytes: 0,
        collective,
    });
}

/// Returns the kernel that stands for an operator.
fn kernel(name: &str, outputs: &Ports) -> Option<&'static str> {
    let float = if outputs.types.to_string().contains("BFloat16") {
        "fused optimizer c10::BFloat16"
    } else {
        "fused optimizer float"
    };
    Some(match name.rsplit("::").next().unwrap_or(name) {
        "mm" | "addmm" | "bmm" | "baddbmm" | "_scaled_mm" => "gemm",
        "_cudnn_attention_forward"
        | "_flash_attention_forward"
        | "_efficient_attention_forward" => "attention fprop",
        "_cudnn_attention_backward"
        | "_flash_attention_backward"
        | "_efficient_attention_backward" => "attention bprop",
        // Casts between backward and optimizer show the type of kept gradients.
        "copy_" => "copy",
        op if op.starts_with("_fused_adam") || op.starts_with("_fused_sgd") => float,
        _ => return None,
    })
}

fn collective(node: &Node) -> Option<Collective> {
    let text = |name: &str| {
        node.attribute(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let number = |name: &str| node.attribute(name).and_then(Value::as_u64).unwrap_or(0);
    let name = text("collective_name");
    if name.is_empty() {
        return None;
    }
    Some(Collective {
        name,
        elements_in: number("in_msg_nelems"),
        elements_out: number("out_msg_nelems"),
        group_size: u32::try_from(number("group_size")).unwrap_or(0),
        dtype: text("dtype"),
        group: text("pg_name"),
        about: text("pg_desc"),
        ranks: text("pg_ranks"),
    })
}

/// Reads the groups and the number of ranks, which the observer writes first.
fn groups(trace: &mut Trace, values: &Value) {
    let text = values
        .as_array()
        .and_then(|v| v.first())
        .and_then(Value::as_str)
        .unwrap_or_default();
    let all: Vec<Value> = serde_json::from_str(text).unwrap_or_default();
    let default = all
        .iter()
        .find(|g| g["pg_desc"] == "default_pg")
        .or_else(|| all.first());
    trace.head.world_size = default
        .and_then(|g| g["group_size"].as_u64())
        .and_then(|n| u32::try_from(n).ok());
}

/// Formats shapes like the profiler: those of scalars and lists of scalars are empty.
fn tensors(shapes: &Value) -> String {
    let list = shapes.as_array().map_or(&[][..], Vec::as_slice);
    let plain = |v: &Value| match v.as_array() {
        Some(items)
            if !items.is_empty()
                && items
                    .iter()
                    .all(|i| i.as_array().is_some_and(Vec::is_empty)) =>
        {
            Value::Array(Vec::new())
        }
        _ => v.clone(),
    };
    Value::Array(list.iter().map(plain).collect()).to_string()
}

/// Formats types like the profiler: `Tensor(float)` is `float`.
fn types(types: &Value) -> String {
    let list = types.as_array().map_or(&[][..], Vec::as_slice);
    let plain = |v: &Value| {
        let text = v.as_str().unwrap_or_default();
        let inner = text
            .strip_prefix("Tensor(")
            .and_then(|t| t.strip_suffix(')'));
        let list = text.starts_with("GenericList[Tensor");
        Value::from(if list {
            "TensorList"
        } else {
            inner.unwrap_or(text)
        })
    };
    Value::Array(list.iter().map(plain).collect()).to_string()
}

/// Formats scalars like the profiler: as text.
fn concrete(values: &str) -> String {
    let list: Vec<Value> = serde_json::from_str(values).unwrap_or_default();
    let plain = |v: &Value| match v {
        Value::Number(n) => Value::from(n.to_string()),
        Value::Bool(true) => Value::from("True"),
        Value::Bool(false) => Value::from("False"),
        _ => Value::from(""),
    };
    Value::Array(list.iter().map(plain).collect()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PyTorch 2.0 writes schema 1.0.1: operands as lists next to one another.
    #[test]
    fn operands_of_both_schemas_are_read() {
        let new = r#"{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 5, "name": "aten::mm", "ctrl_deps": 4,
            "inputs": {"values": [[1,2,0,8,4,"cuda:0"], 3, true], "shapes": [[2,4],[],[]], "types": ["Tensor(float)","Int","Bool"]},
            "outputs": {"values": [], "shapes": [[2,4]], "types": ["Tensor(float)"]},
            "attrs": [{"name": "tid", "type": "uint64", "value": 7}, {"name": "seq_id", "type": "int64", "value": 3}]}]}"#;
        let old = r#"{"schema": "1.0.1", "pid": 1, "nodes": [{"name": "aten::mm", "id": 5, "rf_id": 3, "parent": 4,
            "fw_parent": 0, "seq_id": 3, "scope": 0, "tid": 7, "fw_tid": 0, "op_schema": "",
            "inputs": [[1,2,0,8,4,"cuda:0"], 3, true], "input_shapes": [[2,4],[],[]], "input_types": ["Tensor(float)","Int","Bool"],
            "outputs": [], "output_shapes": [[2,4]], "output_types": ["Tensor(float)"]}]}"#;
        let of = |text: &str| {
            let trace = read(text.as_bytes(), Path::new("a.json")).unwrap();
            let texts: Vec<String> = [
                trace.inputs[0].dims,
                trace.inputs[0].types,
                trace.inputs[0].concrete,
            ]
            .into_iter()
            .map(|id| trace.name(id).to_owned())
            .collect();
            (
                texts,
                trace.threads,
                trace.host[0].sequence,
                trace.device.len(),
            )
        };
        assert_eq!(of(new), of(old));
        assert_eq!(of(old).0[0], "[[2,4],[],[]]");
    }

    #[test]
    fn a_broken_file_says_where_once() {
        let error = read(&b"{\"schema\": 1}"[..], Path::new("a.json")).unwrap_err();
        assert_eq!(error.to_string().matches("line 1").count(), 1, "{error}");
    }
}
