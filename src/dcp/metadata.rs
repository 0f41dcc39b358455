//! The pickled `.metadata` of a folder.

use super::DcpError;
use shardlab_import::pickle::{self, Object, Value};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

/// Name of the file.
pub(super) const FILE: &str = ".metadata";

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// Where an archive is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Name of the file, relative to the folder.
    pub(super) file: String,
    /// First byte, and number of bytes.
    pub(super) at: [u64; 2],
}

/// A part of a tensor: a box of its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// First element, by dimension.
    pub(super) offsets: Vec<u64>,
    /// Number of elements, by dimension.
    pub(super) sizes: Vec<u64>,
    /// Its archive.
    pub(super) place: Place,
}

/// A tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tensor {
    /// Shape.
    pub(super) size: Vec<u64>,
    /// Its parts.
    pub(super) chunks: Vec<Chunk>,
}

/// Contents of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    /// Tensors, by name.
    pub(super) tensors: BTreeMap<String, Tensor>,
    /// Plain values, by name.
    pub(super) values: BTreeMap<String, Place>,
}

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

fn int(n: u64) -> Value {
    Value::Int(n as i64)
}

fn list(items: impl Iterator<Item = Value>) -> Value {
    Value::List(Rc::new(items.collect()))
}

fn dict(pairs: impl Iterator<Item = (Value, Value)>) -> Value {
    Value::Dict(Rc::new(pairs.collect()))
}

fn call(class: &str, args: Vec<Value>) -> Value {
    Value::Object(Rc::new(Object {
        class: class.into(),
        args: Some(args),
        state: None,
    }))
}

fn global(class: &str) -> Value {
    Value::Object(Rc::new(Object {
        class: class.into(),
        args: None,
        state: None,
    }))
}

/// Returns an instance of a class, which is made without its initializer.
fn instance(module: &str, class: &str, state: Value) -> Value {
    Value::Object(Rc::new(Object {
        class: format!("{module}.{class}").into(),
        args: Some(Vec::new()),
        state: Some(state),
    }))
}

fn fields<const N: usize>(fields: [(&str, Value); N]) -> Value {
    dict(fields.into_iter().map(|(name, value)| (text(name), value)))
}

fn size(sizes: &[u64]) -> Value {
    call("torch.Size", vec![list(sizes.iter().map(|n| int(*n)))])
}

impl Metadata {
    /// Returns the pickle.
    pub(super) fn write(&self) -> Vec<u8> {
        let tensors = self.tensors.iter().map(|(name, t)| (text(name), of(t)));
        let bytes = format!("{METADATA}.BytesStorageMetadata");
        let plain = self.values.keys();
        let plain = plain.map(|name| (text(name), call(&bytes, Vec::new())));
        let names = self.tensors.keys().chain(self.values.keys());
        let chunks = self.tensors.iter().flat_map(|(name, tensor)| {
            let chunks = (0..).zip(&tensor.chunks);
            chunks.map(move |(i, c)| (index(name, size(&c.offsets), int(i)), stored(&c.place)))
        });
        let values = self.values.iter().map(|(name, place)| {
            let index = index(name, Value::None, Value::None);
            (index, stored(place))
        });
        let state = fields([
            ("state_dict_metadata", dict(tensors.chain(plain))),
            ("planner_data", dict(names.map(|n| (text(n), path(n))))),
            ("storage_data", dict(chunks.chain(values))),
            ("storage_meta", Value::None),
            ("version", text("1.0.0")),
        ]);
        pickle::write(&instance(METADATA, "Metadata", state))
    }

    /// Reads the file of a folder.
    pub(super) fn read(folder: &Path) -> Result<Self, DcpError> {
        let file = folder.join(FILE);
        let bytes = std::fs::read(&file).map_err(DcpError::io(&file))?;
        let known = known();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        let value = pickle::read_objects(&bytes, &known).map_err(|error| DcpError::Pickle {
            path: file.clone(),
            error,
        })?;
        let damaged = || DcpError::format(&file, "not the metadata of a checkpoint");
        let described = value.get("state_dict_metadata").ok_or_else(damaged)?;
        let storage = value.get("storage_data").ok_or_else(damaged)?;
        let mut out = Self::default();
        for (name, found) in described.pairs() {
            if let (Some(name), Some(size)) = (name.text(), found.get("size")) {
                let tensor = Tensor {
                    size: numbers(size).ok_or_else(damaged)?,
                    chunks: Vec::new(),
                };
                out.tensors.insert(name.to_owned(), tensor);
            }
        }
        for (index, info) in storage.pairs() {
            let name = index.get("fqn").and_then(Value::text).ok_or_else(damaged)?;
            let number = |key: &str| u64::try_from(info.get(key)?.int()?).ok();
            let place = Place {
                file: info
                    .get("relative_path")
                    .and_then(Value::text)
                    .ok_or_else(damaged)?
                    .to_owned(),
                at: [
                    number("offset").ok_or_else(damaged)?,
                    number("length").ok_or_else(damaged)?,
                ],
            };
            let Some(tensor) = out.tensors.get_mut(name) else {
                out.values.insert(name.to_owned(), place);
                continue;
            };
            let offset = index.get("offset").and_then(numbers).ok_or_else(damaged)?;
            let described = described.get(name).and_then(|d| d.get("chunks"));
            let chunks = described.map(Value::items).unwrap_or_default();
            let part = chunks
                .iter()
                .find(|c| c.get("offsets").and_then(numbers).as_ref() == Some(&offset));
            let sizes = part.and_then(|c| numbers(c.get("sizes")?));
            let sizes = sizes.ok_or_else(damaged)?;
            let inside = offset.len() == tensor.size.len()
                && sizes.len() == offset.len()
                && (0..offset.len()).all(|d| offset[d].saturating_add(sizes[d]) <= tensor.size[d]);
            if !inside {
                return Err(damaged());
            }
            tensor.chunks.push(Chunk {
                offsets: offset,
                sizes,
                place,
            });
        }
        Ok(out)
    }
}

/// Returns the description of a contiguous float32 tensor.
fn of(tensor: &Tensor) -> Value {
    let chunk = |c: &Chunk| {
        let state = fields([("offsets", size(&c.offsets)), ("sizes", size(&c.sizes))]);
        instance(METADATA, "ChunkStorageMetadata", state)
    };
    let layout = call(
        "torch.serialization._get_layout",
        vec![text("torch.strided")],
    );
    let contiguous = call(&format!("{METADATA}._MEM_FORMAT_ENCODING"), vec![int(0)]);
    // As torch before 2.15 writes them; later versions read these too.
    let properties = [
        global("torch.float32"),
        layout,
        Value::Bool(false),
        contiguous,
        Value::Bool(false),
    ];
    let properties = Value::Tuple(Rc::new(properties.to_vec()));
    let state = fields([
        (
            "properties",
            instance(METADATA, "TensorProperties", properties),
        ),
        ("size", size(&tensor.size)),
        ("chunks", list(tensor.chunks.iter().map(chunk))),
    ]);
    instance(METADATA, "TensorStorageMetadata", state)
}

fn index(name: &str, offset: Value, number: Value) -> Value {
    let state = fields([("fqn", text(name)), ("offset", offset), ("index", number)]);
    instance(METADATA, "MetadataIndex", state)
}

fn stored(place: &Place) -> Value {
    let state = fields([
        ("relative_path", text(&place.file)),
        ("offset", int(place.at[0])),
        ("length", int(place.at[1])),
        ("transform_descriptors", Value::None),
    ]);
    instance(FILESYSTEM, "_StorageInfo", state)
}

/// Returns the path of a value within nested dictionaries, as `flatten_state_dict` gives it: names
/// of parameters stay whole.
fn path(name: &str) -> Value {
    let parts: Vec<Value> = match name.split_once('.') {
        Some(("model", rest)) => vec![text("model"), text(rest)],
        Some(("optimizer", rest)) => {
            let (what, rest) = rest.split_once('.').unwrap_or((rest, ""));
            let mut parts = vec![text("optimizer"), text(what)];
            if what == "state" {
                let (param, state) = rest.rsplit_once('.').unwrap_or((rest, ""));
                parts.extend([text(param), text(state)]);
            } else {
                let (group, key) = rest.split_once('.').unwrap_or((rest, ""));
                parts.extend([int(group.parse().unwrap_or(0)), text(key)]);
            }
            parts
        }
        _ => vec![text(name)],
    };
    Value::Tuple(Rc::new(parts))
}

/// Returns the numbers of a `torch.Size` or a tuple.
fn numbers(value: &Value) -> Option<Vec<u64>> {
    let sized = value.object().and_then(|o| o.args.as_deref()?.first());
    let items = sized.unwrap_or(value).items().iter();
    items.map(|n| u64::try_from(n.int()?).ok()).collect()
}

/// Returns the classes and functions that a `.metadata` may name.
fn known() -> Vec<String> {
    let metadata = [
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ];
    let dtypes = [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
    ];
    let others = [
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.WindowsPath",
        "collections.OrderedDict",
    ];
    let metadata = metadata.iter().map(|name| format!("{METADATA}.{name}"));
    let dtypes = dtypes.iter().map(|name| format!("torch.{name}"));
    let others = others.iter().map(|name| (*name).to_owned());
    metadata.chain(dtypes).chain(others).collect()
}
