//! The `safetensors` file format, read by range and written as a stream: no file is ever completely
//! in memory.

use super::TrainError;
use super::data::floats;
use serde_json::{Map, Value, json};
use shardlab_plan::ir::DType;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest header that is read, in bytes (the format's own limit).
const MAX_HEADER: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    /// Range of bytes, from the start of the file.
    pub(crate) bytes: Range<u64>,
}

impl Entry {
    pub(crate) fn numel(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    pub(crate) entries: BTreeMap<String, Entry>,
}

impl TensorFile {
    /// Opens a file and checks its header against its size.
    pub(crate) fn open(path: &Path) -> Result<Self, TrainError> {
        let fault = |what: &str| TrainError::format(path, what);
        let mut file = File::open(path).map_err(TrainError::io(path))?;
        let size = file.metadata().map_err(TrainError::io(path))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length)
            .map_err(|_| fault("too short for a safetensors file"))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length + 8 > size {
            return Err(fault(
                "truncated, or not a safetensors file: the header does not fit",
            ));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(TrainError::io(path))?;
        let header: Map<String, Value> =
            serde_json::from_slice(&header).map_err(|e| fault(&format!("header: {e}")))?;
        let mut entries = BTreeMap::new();
        for (name, value) in header {
            if name == "__metadata__" {
                continue;
            }
            let entry = entry(&value, length + 8).ok_or_else(|| {
                fault(&format!(
                    "tensor `{name}` has an invalid or unsupported description"
                ))
            })?;
            if entry.bytes.end > size {
                return Err(fault(&format!(
                    "truncated: tensor `{name}` ends at byte {} of {size}",
                    entry.bytes.end
                )));
            }
            entries.insert(name, entry);
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            entries,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads elements of a tensor as float32.
    pub(crate) fn read(
        &mut self,
        entry: &Entry,
        elements: Range<u64>,
    ) -> Result<Vec<f32>, TrainError> {
        let size = entry.dtype.size();
        let mut bytes = vec![0; ((elements.end - elements.start) * size) as usize];
        let at = SeekFrom::Start(entry.bytes.start + elements.start * size);
        self.file
            .seek(at)
            .and_then(|_| self.file.read_exact(&mut bytes))
            .map_err(TrainError::io(&self.path))?;
        Ok(floats(&bytes, entry.dtype))
    }
}

fn entry(value: &Value, data: u64) -> Option<Entry> {
    let name = value.get("dtype")?.as_str()?;
    let dtype = DType::find(|n| n.safetensors == name)?;
    let numbers = |key: &str| -> Option<Vec<u64>> {
        value
            .get(key)?
            .as_array()?
            .iter()
            .map(Value::as_u64)
            .collect()
    };
    let shape = numbers("shape")?;
    let [start, end] = numbers("data_offsets")?[..] else {
        return None;
    };
    let bytes = shape
        .iter()
        .try_fold(dtype.size(), |n, d| n.checked_mul(*d))?;
    let fits = end.checked_sub(start)? == bytes && end.checked_add(data).is_some();
    fits.then(|| Entry {
        dtype,
        shape,
        bytes: data + start..data + end,
    })
}

/// Returns the header of a file with tensors in a given order: names, types and shapes.
pub(crate) fn header(tensors: &[(String, DType, Vec<u64>)]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * dtype.size();
        map.insert(
            name.clone(),
            json!({"dtype": dtype.numeric().safetensors, "shape": shape, "data_offsets": [at, at + bytes]}),
        );
        at += bytes;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    // Data begin at a multiple of eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out
}

/// Writes a file under a temporary name in the same folder, syncs it, and renames it.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let temporary = path.with_extension("tmp");
    let file = File::create(&temporary).map_err(TrainError::io(&temporary))?;
    let mut out = std::io::BufWriter::new(file);
    let done = write(&mut out).and_then(|()| {
        out.flush()
            .and_then(|()| out.get_ref().sync_all())
            .and_then(|()| std::fs::rename(&temporary, path))
            .map_err(TrainError::io(path))
    });
    if done.is_err() {
        // The temporary file is removed, and the first error is reported.
        let _ = std::fs::remove_file(&temporary);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::data::encode;

    #[test]
    fn the_format_is_that_of_the_safetensors_crate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let tensors = [
            ("b".to_owned(), DType::F32, vec![2, 3]),
            ("a".to_owned(), DType::Bf16, vec![4]),
            ("empty".to_owned(), DType::F32, vec![0]),
        ];
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.5];
        replace(&path, |out| {
            out.write_all(&header(&tensors)).unwrap();
            out.write_all(&encode(&values, DType::F32)).unwrap();
            out.write_all(&encode(&[0.5, -1.0, 2.0, 8.0], DType::Bf16))
                .unwrap();
            Ok(())
        })
        .unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let bytes = std::fs::read(&path).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let a = theirs.tensor("a").unwrap();
        assert_eq!((a.shape(), a.dtype()), (&[4][..], safetensors::Dtype::BF16));
        assert_eq!(floats(a.data(), DType::Bf16), [0.5, -1.0, 2.0, 8.0]);
        let mut ours = TensorFile::open(&path).unwrap();
        let b = ours.entries["b"].clone();
        assert_eq!(ours.read(&b, 2..5).unwrap(), [3.0, 4.0, 5.0]);
        // A truncated file is rejected when it is opened.
        for end in [0, 7, 20, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..end]).unwrap();
            assert!(TensorFile::open(&path).is_err(), "{end}");
        }
    }
}
