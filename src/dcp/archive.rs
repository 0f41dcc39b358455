//! Archives of `torch.save`: zip files without compression that contain a pickle and the bytes of
//! tensors.

use shardlab_import::pickle::{self, PERSISTENT, Value};
use std::io::{Cursor, Read, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Classes and functions that occur in the pickle of a tensor.
const KNOWN: [&str; 9] = [
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.FloatStorage",
    "torch.BFloat16Storage",
    "torch.HalfStorage",
    "torch.DoubleStorage",
    "collections.OrderedDict",
    "torch.storage.UntypedStorage",
    "torch.Size",
];

/// Returns the archive of a contiguous float32 tensor.
pub(super) fn tensor(shape: &[u64], values: &[f32]) -> std::io::Result<Vec<u8>> {
    let storage = Value::tuple([
        Value::from("storage"),
        Value::class("torch.FloatStorage"),
        Value::from("0"),
        Value::from("cpu"),
        Value::from(values.len() as u64),
    ]);
    let rebuilt = Value::call(
        "torch._utils._rebuild_tensor_v2",
        vec![
            Value::call(PERSISTENT, vec![storage]),
            Value::from(0),
            Value::tuple(shape.iter().copied().map(Value::from)),
            Value::tuple(contiguous(shape).into_iter().map(Value::from)),
            Value::Bool(false),
            Value::call("collections.OrderedDict", Vec::new()),
        ],
    );
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    archive(&rebuilt, Some(&bytes))
}

/// Returns the archive of a plain value.
pub(super) fn plain(value: &Value) -> std::io::Result<Vec<u8>> {
    archive(value, None)
}

fn archive(value: &Value, data: Option<&[u8]>) -> std::io::Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let large = data.is_some_and(|d| d.len() >= u32::MAX as usize);
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .large_file(large);
    let mut add = |name: &str, bytes: &[u8]| -> std::io::Result<()> {
        zip.start_file(name, options)?;
        zip.write_all(bytes)
    };
    add("archive/data.pkl", &pickle::write(value))?;
    add("archive/byteorder", b"little")?;
    if let Some(data) = data {
        add("archive/data/0", data)?;
    }
    add("archive/version", b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

/// Reads the archive of a tensor: its shape and its elements, row-major.
///
/// # Errors
/// Returns a message if the archive is damaged or has another content.
pub(super) fn read(bytes: &[u8]) -> Result<(Vec<u64>, Vec<f32>), String> {
    let mut zip = ZipArchive::new(Cursor::new(bytes)).map_err(|e| e.to_string())?;
    let entry = |zip: &mut ZipArchive<Cursor<&[u8]>>, name: &str| -> Result<Vec<u8>, String> {
        let full = zip
            .file_names()
            .filter_map(Result::ok)
            .find(|n| n.split_once('/').is_some_and(|(_, rest)| rest == name))
            .map(|n| n.to_string())
            .ok_or_else(|| format!("the archive has no `{name}`"))?;
        let mut file = zip.by_name(&full).map_err(|e| e.to_string())?;
        let mut out = Vec::new();
        file.read_to_end(&mut out).map_err(|e| e.to_string())?;
        Ok(out)
    };
    let order = entry(&mut zip, "byteorder").unwrap_or_else(|_| b"little".to_vec());
    if order.trim_ascii() != b"little" {
        return Err("a tensor is big-endian".to_owned());
    }
    let described = entry(&mut zip, "data.pkl")?;
    let described = pickle::read_objects(&described, &KNOWN).map_err(|e| e.to_string())?;
    let Described {
        shape,
        strides,
        offset,
        storage,
    } = parts(&described).ok_or("an archive that is not a tensor")?;
    let key = storage.get(2).and_then(Value::text);
    let class = storage.get(1).and_then(Value::object);
    let (Some(key), Some(class)) = (key, class) else {
        return Err("a tensor without a storage".to_owned());
    };
    let data = entry(&mut zip, &format!("data/{key}"))?;
    let stored =
        decode(&data, &class.class).ok_or_else(|| format!("elements of `{}`", class.class))?;
    let short = || "a tensor ends beyond its storage".to_owned();
    let numel = usize::try_from(shape.iter().product::<u64>()).map_err(|_| short())?;
    let first = usize::try_from(offset).map_err(|_| short())?;
    if strides == contiguous(&shape) || numel <= 1 {
        let end = first.checked_add(numel).ok_or_else(short)?;
        let values = stored.get(first..end).ok_or_else(short)?.to_vec();
        return Ok((shape, values));
    }
    let mut values = Vec::with_capacity(numel.min(stored.len()));
    let mut index = vec![0; shape.len()];
    for _ in 0..numel {
        let at: u64 = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
        let at = usize::try_from(at + offset).map_err(|_| short())?;
        values.push(*stored.get(at).ok_or_else(short)?);
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            if index[d] < shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Ok((shape, values))
}

/// Returns the strides of a contiguous tensor, in elements.
fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut strides = shape.to_vec();
    let mut step = 1;
    for stride in strides.iter_mut().rev() {
        step *= std::mem::replace(stride, step);
    }
    strides
}

/// Returns the elements of a storage as float32; `None` if they have another type.
fn decode(bytes: &[u8], class: &str) -> Option<Vec<f32>> {
    fn all<const N: usize>(bytes: &[u8], one: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|b| one(*b)).collect()
    }
    match class {
        "torch.FloatStorage" => Some(all(bytes, f32::from_le_bytes)),
        "torch.DoubleStorage" => Some(all(bytes, |b| f64::from_le_bytes(b) as f32)),
        "torch.BFloat16Storage" => Some(all(bytes, |b| half::bf16::from_le_bytes(b).to_f32())),
        "torch.HalfStorage" => Some(all(bytes, |b| half::f16::from_le_bytes(b).to_f32())),
        _ => None,
    }
}

/// The description of a tensor in a pickle.
struct Described {
    shape: Vec<u64>,
    strides: Vec<u64>,
    /// Index of the first element in the storage.
    offset: u64,
    /// Identity of the storage.
    storage: Vec<Value>,
}

/// Returns the description of a tensor.
fn parts(value: &Value) -> Option<Described> {
    let object = value.object()?;
    let args = object.args.as_deref()?;
    if &*object.class == "torch._utils._rebuild_parameter" {
        return parts(args.first()?);
    }
    if &*object.class != "torch._utils._rebuild_tensor_v2" {
        return None;
    }
    let [storage, offset, shape, strides, ..] = args else {
        return None;
    };
    let id = storage.object()?.args.as_deref()?.first()?;
    Some(Described {
        shape: shape.numbers()?,
        strides: strides.numbers()?,
        offset: u64::try_from(offset.int()?).ok()?,
        storage: id.items().to_vec(),
    })
}
