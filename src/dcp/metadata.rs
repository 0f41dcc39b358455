//! The pickled `.metadata` of a folder.

use super::DcpError;
use shardlab_import::pickle::{self, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the file.
pub(super) const FILE: &str = ".metadata";

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// Where an archive is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Name of the file, relative to the folder.
    pub(super) file: String,
    /// Position of the first byte, and number of bytes.
    pub(super) at: [u64; 2],
}

/// A part of a tensor: a box of its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// First element, by dimension.
    pub(super) offsets: Vec<u64>,
    /// Number of elements in each dimension.
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

/// Returns an instance of a class of a module with these fields.
fn instance<const N: usize>(module: &str, class: &str, fields: [(&str, Value); N]) -> Value {
    Value::instance(&format!("{module}.{class}"), Value::dict(fields))
}

fn size(sizes: &[u64]) -> Value {
    let sizes = Value::list(sizes.iter().copied().map(Value::from));
    Value::call("torch.Size", vec![sizes])
}

impl Metadata {
    /// Returns the pickle.
    pub(super) fn write(&self) -> Vec<u8> {
        let tensors = self.tensors.iter();
        let tensors = tensors.map(|(name, t)| (Value::from(name.as_str()), of(t)));
        let bytes = format!("{METADATA}.BytesStorageMetadata");
        let plain = self.values.keys();
        let plain = plain.map(|name| {
            let metadata = Value::call(&bytes, Vec::new());
            (Value::from(name.as_str()), metadata)
        });
        let names = self.tensors.keys().chain(self.values.keys());
        let chunks = self.tensors.iter().flat_map(|(name, tensor)| {
            let chunks = (0..).zip(&tensor.chunks);
            chunks.map(move |(i, c)| {
                (
                    index(name, size(&c.offsets), Value::from(i)),
                    stored(&c.place),
                )
            })
        });
        let values = self.values.iter().map(|(name, place)| {
            let index = index(name, Value::None, Value::None);
            (index, stored(place))
        });
        let names = names.map(|name| (name.as_str(), path(name)));
        let fields = [
            ("state_dict_metadata", Value::dict(tensors.chain(plain))),
            ("planner_data", Value::dict(names)),
            ("storage_data", Value::dict(chunks.chain(values))),
            ("storage_meta", Value::None),
            ("version", Value::from("1.0.0")),
        ];
        pickle::write(&instance(METADATA, "Metadata", fields))
    }

    /// Reads the metadata of a folder.
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
                    size: size.numbers().ok_or_else(damaged)?,
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
            let offset = index
                .get("offset")
                .and_then(Value::numbers)
                .ok_or_else(damaged)?;
            let described = described.get(name).and_then(|d| d.get("chunks"));
            let chunks = described.map(Value::items).unwrap_or_default();
            let part = chunks
                .iter()
                .find(|c| c.get("offsets").and_then(Value::numbers).as_ref() == Some(&offset));
            let sizes = part.and_then(|c| c.get("sizes")?.numbers());
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
        let fields = [("offsets", size(&c.offsets)), ("sizes", size(&c.sizes))];
        instance(METADATA, "ChunkStorageMetadata", fields)
    };
    let strided = Value::from("torch.strided");
    let layout = Value::call("torch.serialization._get_layout", vec![strided]);
    let format = format!("{METADATA}._MEM_FORMAT_ENCODING");
    let contiguous = Value::call(&format, vec![Value::from(0)]);
    // As PyTorch before 2.15 writes them. Later versions can read these, too.
    let properties = [
        Value::class("torch.float32"),
        layout,
        Value::Bool(false),
        contiguous,
        Value::Bool(false),
    ];
    let class = format!("{METADATA}.TensorProperties");
    let fields = [
        (
            "properties",
            Value::instance(&class, Value::tuple(properties)),
        ),
        ("size", size(&tensor.size)),
        ("chunks", Value::list(tensor.chunks.iter().map(chunk))),
    ];
    instance(METADATA, "TensorStorageMetadata", fields)
}

fn index(name: &str, offset: Value, number: Value) -> Value {
    let fields = [
        ("fqn", Value::from(name)),
        ("offset", offset),
        ("index", number),
    ];
    instance(METADATA, "MetadataIndex", fields)
}

fn stored(place: &Place) -> Value {
    let fields = [
        ("relative_path", Value::from(place.file.as_str())),
        ("offset", Value::from(place.at[0])),
        ("length", Value::from(place.at[1])),
        ("transform_descriptors", Value::None),
    ];
    instance(FILESYSTEM, "_StorageInfo", fields)
}

/// Returns the path of a value within nested dictionaries, as in `flatten_state_dict`. Names of
/// parameters are not divided.
fn path(name: &str) -> Value {
    let parts: Vec<Value> = match name.split_once('.') {
        Some(("model", rest)) => vec![Value::from("model"), Value::from(rest)],
        Some(("optimizer", rest)) => {
            let (what, rest) = rest.split_once('.').unwrap_or((rest, ""));
            let mut parts = vec![Value::from("optimizer"), Value::from(what)];
            if what == "state" {
                let (param, state) = rest.rsplit_once('.').unwrap_or((rest, ""));
                parts.extend([Value::from(param), Value::from(state)]);
            } else {
                let (group, key) = rest.split_once('.').unwrap_or((rest, ""));
                parts.extend([
                    Value::from(group.parse().unwrap_or(0_u64)),
                    Value::from(key),
                ]);
            }
            parts
        }
        _ => vec![Value::from(name)],
    };
    Value::tuple(parts)
}

/// Returns the classes and functions that may occur in a `.metadata` file.
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
