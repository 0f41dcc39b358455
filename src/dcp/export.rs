//! Writes a folder.

use super::metadata::{self, Chunk, Metadata, Place, Tensor};
use super::{DcpError, archive};
use shardlab_exec::train::checkpoint::Checkpoint;
use shardlab_exec::train::{Kind, hf};
use shardlab_import::pickle::Value;
use shardlab_plan::config::Optimizer;
use shardlab_plan::{Program, Scenario};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes a checkpoint as PyTorch does for a model that FSDP2 has sharded over `ranks` ranks, with
/// optimizer states if there are any. All values are float32.
///
/// # Errors
/// Fails if the checkpoint does not belong to this model, if the folder is not empty, or if a file
/// cannot be read or written.
pub fn export(
    scenario: &Scenario,
    program: &Program,
    checkpoint: &mut Checkpoint,
    folder: &Path,
    ranks: u32,
) -> Result<(), DcpError> {
    if scenario.train.optimizer == Optimizer::Muon && checkpoint.progress().step > 0 {
        let what = "states of Muon and AdamW in one checkpoint have no form that torch reads; \
                    export the weights with `exec --export`";
        return Err(DcpError::format(folder, what));
    }
    let of = checkpoint.indices(program)?;
    std::fs::create_dir_all(folder).map_err(DcpError::io(folder))?;
    let mut entries = std::fs::read_dir(folder).map_err(DcpError::io(folder))?;
    if entries.next().is_some() {
        return Err(DcpError::format(folder, "the folder is not empty"));
    }
    let mut out = Writer::new(folder, ranks.max(1))?;
    let step = checkpoint.progress().step;
    let mut trained = Vec::new();
    for (tensors, param) in hf::tensors(program).iter().zip(of) {
        for kind in Kind::ALL {
            let Some(values) = checkpoint.whole(param, kind)? else {
                continue;
            };
            for tensor in tensors {
                let part = tensor.published(&values);
                let name = &tensor.name;
                if kind == Kind::Master {
                    out.tensor(format!("model.{name}"), &tensor.shape, &part)?;
                    if scenario.model.tie_embeddings && is_embedding(name) {
                        out.alias("model.lm_head.weight", &format!("model.{name}"));
                    }
                    continue;
                }
                if kind == Kind::First {
                    let at = format!("optimizer.state.{name}.step");
                    out.tensor(at, &[], &[step as f32])?;
                    trained.push(name.clone());
                }
                let state = kind.name();
                out.tensor(
                    format!("optimizer.state.{name}.{state}"),
                    &tensor.shape,
                    &part,
                )?;
            }
        }
    }
    if !trained.is_empty() {
        for (key, value) in param_group(scenario, &trained) {
            out.value(format!("optimizer.param_groups.0.{key}"), &value)?;
        }
    }
    out.finish()
}

/// Returns whether a tensor is the table of token embeddings. If embeddings are tied, Transformers
/// also lists it as the output layer.
fn is_embedding(name: &str) -> bool {
    [
        ".embed_tokens.weight",
        ".wte.weight",
        ".word_embeddings.weight",
        ".embed_in.weight",
    ]
    .iter()
    .any(|end| name.ends_with(end))
}

/// Returns the settings that `torch.optim` stores with its states.
fn param_group(scenario: &Scenario, params: &[String]) -> Vec<(&'static str, Value)> {
    let t = &scenario.train;
    let names = params.iter().map(|n| Value::from(n.as_str()));
    let mut all = vec![
        ("lr", Value::Float(t.lr)),
        ("weight_decay", Value::Float(t.weight_decay)),
        ("maximize", Value::Bool(false)),
        ("foreach", Value::None),
        ("differentiable", Value::Bool(false)),
        ("fused", Value::None),
        ("params", Value::list(names)),
    ];
    all.push(("betas", Value::tuple(t.betas.map(Value::Float))));
    if t.optimizer == Optimizer::Adamw {
        all.extend([
            ("eps", Value::Float(t.eps)),
            ("amsgrad", Value::Bool(false)),
            ("capturable", Value::Bool(false)),
            ("decoupled_weight_decay", Value::Bool(true)),
        ]);
    }
    all
}

struct Writer {
    folder: PathBuf,
    /// The file of each rank, and the number of bytes in it.
    files: Vec<(BufWriter<File>, u64)>,
    metadata: Metadata,
}

impl Writer {
    fn new(folder: &Path, ranks: u32) -> Result<Self, DcpError> {
        let open = |rank| {
            let path = folder.join(name_of(rank));
            let file = File::create(&path).map_err(DcpError::io(&path))?;
            Ok((BufWriter::new(file), 0))
        };
        Ok(Self {
            folder: folder.to_owned(),
            files: (0..ranks).map(open).collect::<Result<_, DcpError>>()?,
            metadata: Metadata::default(),
        })
    }

    fn append(&mut self, rank: usize, bytes: &[u8]) -> Result<Place, DcpError> {
        let file = name_of(rank as u32);
        let (out, end) = &mut self.files[rank];
        let path = self.folder.join(&file);
        out.write_all(bytes).map_err(DcpError::io(&path))?;
        let at = [*end, bytes.len() as u64];
        *end += at[1];
        Ok(Place { file, at })
    }

    /// Writes a tensor in pieces of adjacent rows, as `torch.chunk` divides it.
    fn tensor(&mut self, name: String, shape: &[u64], values: &[f32]) -> Result<(), DcpError> {
        let ranks = self.files.len() as u64;
        let rows = shape.first().copied().unwrap_or(1);
        let row: u64 = shape.iter().skip(1).product();
        let each = rows.div_ceil(ranks).max(1);
        let mut tensor = Tensor {
            size: shape.to_vec(),
            chunks: Vec::new(),
        };
        for rank in 0..ranks {
            let (from, to) = ((rank * each).min(rows), ((rank + 1) * each).min(rows));
            if from == to {
                break;
            }
            let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
            if let (Some(offset), Some(size)) = (offsets.first_mut(), sizes.first_mut()) {
                (*offset, *size) = (from, to - from);
            }
            let part = &values[(from * row) as usize..(to * row) as usize];
            let bytes = archive::tensor(&sizes, part).map_err(DcpError::io(&self.folder))?;
            let place = self.append(rank as usize, &bytes)?;
            tensor.chunks.push(Chunk {
                offsets,
                sizes,
                place,
            });
        }
        self.metadata.tensors.insert(name, tensor);
        Ok(())
    }

    /// Lists a tensor under a second name.
    fn alias(&mut self, name: &str, of: &str) {
        if let Some(tensor) = self.metadata.tensors.get(of).cloned() {
            self.metadata.tensors.insert(name.to_owned(), tensor);
        }
    }

    fn value(&mut self, name: String, value: &Value) -> Result<(), DcpError> {
        let bytes = archive::plain(value).map_err(DcpError::io(&self.folder))?;
        let place = self.append(0, &bytes)?;
        self.metadata.values.insert(name, place);
        Ok(())
    }

    /// Writes the metadata last, so that a folder with metadata is complete.
    fn finish(self) -> Result<(), DcpError> {
        let folder = &self.folder;
        for (rank, (out, _)) in self.files.into_iter().enumerate() {
            let path = folder.join(name_of(rank as u32));
            let file = out.into_inner().map_err(|e| e.into_error());
            file.and_then(|f| f.sync_all())
                .map_err(DcpError::io(&path))?;
        }
        let temporary = folder.join(".metadata.tmp");
        let path = folder.join(metadata::FILE);
        std::fs::write(&temporary, self.metadata.write()).map_err(DcpError::io(&temporary))?;
        std::fs::rename(&temporary, &path).map_err(DcpError::io(&path))
    }
}

/// Returns the name of a rank's file.
fn name_of(rank: u32) -> String {
    format!("__{rank}_0.distcp")
}
