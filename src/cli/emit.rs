//! `--emit`: writes settings in the form of a framework, as a scenario, or as Python code.

use super::output::{Failure, Out, say, write_file};
use super::subject::Subject;
use shardlab_frameworks::emit::{Edited, Form, Unexpressed, edit, edit_scenario, fresh, python};
use shardlab_plan::Scenario;
use similar::TextDiff;
use std::path::{Path, PathBuf};

/// Lines around a difference.
const CONTEXT: usize = 3;

/// Forms of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Emit {
    /// The files of the job, as a diff
    Job,
    /// A scenario file
    Scenario,
    /// PyTorch code that calls fully_shard
    Python,
    /// YAML of Accelerate
    Accelerate,
    /// YAML of the Hugging Face Trainer
    Trainer,
    /// TOML of torchtitan
    Torchtitan,
    /// Shell script that starts Megatron-LM
    Megatron,
    /// JSON of DeepSpeed
    Deepspeed,
}

/// `--emit` and where to.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct EmitArgs {
    /// Print the settings in another format instead of the answer
    ///
    /// In the format of the job, it is a diff of its files. Settings that a format cannot express
    /// are listed on stderr.
    #[arg(long, value_name = "FORM")]
    pub(super) emit: Option<Emit>,
    /// With --emit: write the whole file here
    #[arg(short, long, value_name = "FILE", requires = "emit")]
    output: Option<PathBuf>,
}

impl Emit {
    /// Returns the form of a framework.
    fn form(self) -> Option<Form> {
        Some(match self {
            Self::Job | Self::Scenario | Self::Python => return None,
            Self::Accelerate => Form::Accelerate,
            Self::Trainer => Form::Trainer,
            Self::Torchtitan => Form::Torchtitan,
            Self::Megatron => Form::Megatron,
            Self::Deepspeed => Form::DeepSpeed,
        })
    }
}

/// The output: files of the job with changes, or a text that is not in a file yet.
enum Written {
    Edits(Vec<Edited>),
    Text(String),
}

impl EmitArgs {
    /// Writes a job with changes (in the syntax of `--set`) in the requested form. `to` is the
    /// scenario of the job with the changes.
    pub(super) fn write(
        &self,
        emit: Emit,
        subject: &Subject,
        changes: &[String],
        to: &Scenario,
        out: &mut Out,
    ) -> Result<(), Failure> {
        let changes = last_of_each_key(&[subject.set(), changes].concat());
        let (written, lost) = written(emit, subject, &changes, to)?;
        for Unexpressed { set, why } in lost {
            say(format_args!("warning: not expressed: {set} ({why})"));
        }
        match (written, &self.output) {
            (Written::Text(text), None) => out.text(text)?,
            (Written::Text(text), Some(file)) => save(file, &text)?,
            (Written::Edits(files), Some(file)) => match files.as_slice() {
                [one] => save(file, &one.after)?,
                [] => return Err(Failure::bad_input("--output: no file changes")),
                several => {
                    let names: Vec<String> = several
                        .iter()
                        .map(|f| f.path.display().to_string())
                        .collect();
                    return Err(Failure::bad_input(format_args!(
                        "--output: several files change: {}; without --output, their diff is printed",
                        names.join(", ")
                    )));
                }
            },
            (Written::Edits(files), None) => {
                for file in files {
                    out.text(diff(&file))?;
                }
            }
        }
        Ok(())
    }
}

fn written(
    emit: Emit,
    subject: &Subject,
    changes: &[String],
    to: &Scenario,
) -> Result<(Written, Vec<Unexpressed>), Failure> {
    let is_own = emit == Emit::Job
        || emit
            .form()
            .is_some_and(|form| Some(form.framework()) == subject.framework());
    match (subject, emit.form()) {
        (Subject::Job { files, options, .. }, _) if is_own => {
            let edits = edit(files, options, changes, to).map_err(Failure::bad_input)?;
            Ok((Written::Edits(edits.files), edits.lost))
        }
        (_, Some(form)) => {
            let (text, lost) = fresh(form, to, changes).map_err(Failure::bad_input)?;
            Ok((Written::Text(text), lost))
        }
        (_, None) if emit == Emit::Python => {
            let (text, lost) = python(to);
            Ok((Written::Text(text), lost))
        }
        _ => {
            let path = match subject {
                Subject::Scenario { path, .. } => path.clone(),
                Subject::Job { job, .. } => PathBuf::from(format!("{}.toml", job.name)),
            };
            let before = subject.text()?;
            let after = edit_scenario(&path, &before, changes).map_err(Failure::bad_input)?;
            let written = match is_own {
                true => Written::Edits(vec![Edited {
                    path,
                    before,
                    after,
                }]),
                false => Written::Text(after),
            };
            Ok((written, Vec::new()))
        }
    }
}

fn save(file: &Path, text: &str) -> Result<(), Failure> {
    write_file("--output", file, |to| to.write_all(text.as_bytes()))?;
    say(format_args!("wrote {}", file.display()));
    Ok(())
}

fn diff(file: &Edited) -> String {
    let diff = TextDiff::from_lines(&file.before, &file.after);
    let name = file.path.display().to_string();
    let mut unified = diff.unified_diff();
    let unified = unified.context_radius(CONTEXT).header(&name, &name);
    unified.to_string()
}

/// Returns the last override of each key, in order.
fn last_of_each_key(sets: &[String]) -> Vec<String> {
    let key = |set: &str| {
        set.split_once('=')
            .map_or(set.to_owned(), |(k, _)| k.to_owned())
    };
    let later = |i: usize| sets[i + 1..].iter().any(|s| key(s) == key(&sets[i]));
    let kept = (0..sets.len()).filter(|i| !later(*i));
    kept.map(|i| sets[i].clone()).collect()
}
