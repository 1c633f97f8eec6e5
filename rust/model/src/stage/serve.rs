//! Worker's end of the connection to the process that schedules; the frames are those of [`link`](super::link).

use std::collections::VecDeque;
use std::io::{BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};

use bytemuck::NoUninit;
use ferrule_kernels::Cancel;

use super::link::{ALLOCATE, ANSWER, COMPUTED_LOGITS, FAILURE, LOGITS, LOOK_UP, LOOKED_UP, RANK_LOST, STEP};
use super::link::{LinkError, StageInfo, read_bytes, read_numbers, read_word, to_word};
use super::logit_words::{NeededLogits, needed_per_row, words_of};
use super::{Stage, StageRunError, StageStep, StepError};

/// A request that a worker has received.
enum Request {
    Allocate(Vec<usize>),
    Step(StageStep, Vec<f32>),
    LookUp(Vec<u32>),
    /// Rows, and the needed logits of each.
    Logits(Vec<f32>, Vec<NeededLogits>),
}

/// Runs a stage for the process at the other end of a connection, until that ends it. A thread receives requests while
/// the stage computes, so that the other end never waits to send, and another one looks up tokens. When the connection
/// ends, `cancel` is set, so that the stage does not wait for other workers.
///
/// # Errors
/// [`LinkError`] for a request that failed, which is also reported to the other end, and for a connection that ends
/// within a frame. The connection has ended then.
pub fn serve_stage(stage: &mut Stage, kv_budget: u64, stream: &UnixStream, cancel: &Cancel) -> Result<(), LinkError> {
    let (mut reader, mut writer) = (BufReader::new(stream), BufWriter::new(stream));
    let info =
        serde_json::to_vec(&StageInfo::new(stage, kv_budget)).expect("a description consists of numbers and names");
    writer.write_all(&(info.len() as u32).to_le_bytes())?;
    writer.write_all(&info)?;
    writer.flush()?;
    let (width, limits, token_rows) = (stage.input_width(), stage.kv_groups().len(), stage.token_rows());
    let writer = &Mutex::new(writer);
    std::thread::scope(|scope| {
        let (look_ups, tokens) = mpsc::channel::<Vec<u32>>();
        let looking_up = scope.spawn(move || {
            let served = tokens.into_iter().try_for_each(|tokens| {
                let rows = caught(|| token_rows.read(&tokens).map_err(worker_error));
                send_answer(writer, LOOKED_UP, rows)
            });
            if served.is_err() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            served
        });
        let (sender, requests) = mpsc::channel();
        scope.spawn(move || {
            loop {
                let request = receive_request(&mut reader, width, limits).transpose();
                let ends = !matches!(request, Some(Ok(_)));
                let is_sent = match request {
                    Some(Ok(Request::LookUp(tokens))) => look_ups.send(tokens).is_ok(),
                    Some(request) => sender.send(request).is_ok(),
                    None => false,
                };
                if ends || !is_sent {
                    cancel.cancel();
                    return;
                }
            }
        });
        let mut buffers = Buffers::default();
        let mut requests = logits_first(&requests);
        let served = requests.try_for_each(|request| answer(stage, request, cancel, writer, &mut buffers));
        // The threads that receive and look up must not wait for another request.
        let _ = stream.shutdown(Shutdown::Both);
        // What fails first closes the connection for the other.
        match (served, looking_up.join().expect("panics are caught")) {
            (Err(LinkError::Io(_)), Err(cause)) => Err(cause),
            (served, looked_up) => served.and(looked_up),
        }
    })
}

/// Returns the requests that arrive: those that wait for logits first, then the others in their order.
fn logits_first(
    requests: &mpsc::Receiver<Result<Request, LinkError>>,
) -> impl Iterator<Item = Result<Request, LinkError>> {
    let mut waiting = VecDeque::new();
    std::iter::from_fn(move || {
        if waiting.is_empty() {
            waiting.extend(requests.recv());
        }
        waiting.extend(requests.try_iter());
        let urgent = waiting.iter().position(|request| matches!(request, Ok(Request::Logits(..))));
        waiting.remove(urgent.unwrap_or(0))
    })
}

/// Sends the words of an answer, or the error in their place, and returns this error.
fn send_answer<T: NoUninit>(
    writer: &Mutex<BufWriter<&UnixStream>>,
    kind: u32,
    words: Result<impl AsRef<[T]>, LinkError>,
) -> Result<(), LinkError> {
    const { assert!(size_of::<T>() == size_of::<u32>()) }
    let writer = &mut *writer.lock().unwrap_or_else(PoisonError::into_inner);
    match &words {
        Ok(words) => write_frame(writer, kind, words.as_ref().len(), bytemuck::cast_slice(words.as_ref()))?,
        Err(LinkError::RankLost { rank }) => write_frame(writer, RANK_LOST, *rank, &[])?,
        Err(error) => {
            let message = error.to_string();
            write_frame(writer, FAILURE, message.len(), message.as_bytes())?;
        }
    }
    words.map(drop)
}

/// Returns what a worker reports of an error.
fn failure(error: StageRunError) -> LinkError {
    match error {
        StageRunError::RankLost { rank } => LinkError::RankLost { rank },
        error => worker_error(error),
    }
}

/// Buffers of a worker, which are reused from request to request, since logits are megabytes.
#[derive(Default)]
struct Buffers {
    output: Vec<f32>,
    logits: Vec<f32>,
    words: Vec<u32>,
}

/// Does what a request asks for, and sends the answer. After a step of the last stage, sends the logits too.
fn answer(
    stage: &mut Stage,
    request: Result<Request, LinkError>,
    cancel: &Cancel,
    writer: &Mutex<BufWriter<&UnixStream>>,
    buffers: &mut Buffers,
) -> Result<(), LinkError> {
    match request {
        Err(error) => send_answer(writer, ANSWER, Err::<&[u32], _>(error)),
        Ok(Request::Allocate(pages)) => {
            send_answer(writer, ANSWER, caught(|| stage.allocate_kv(&pages).map(|()| [0_u32; 0]).map_err(worker_error)))
        }
        Ok(Request::Step(step, input)) => {
            let mut output = std::mem::take(&mut buffers.output);
            let done = caught(|| stage.step(&step, &input, cancel, &mut output).map_err(failure));
            // All workers of a stage have the same output.
            let sent = if stage.rank() == 0 { &output[..] } else { &[] };
            send_answer(writer, ANSWER, done.map(|()| sent))?;
            let needed = needed_per_row(&step.chunks());
            if !needed.is_empty() && stage.continues_with_logits(&step) {
                send_logits(stage, (&output, &needed), cancel, writer, buffers)?;
            }
            buffers.output = output;
            Ok(())
        }
        Ok(Request::Logits(rows, needed)) => send_logits(stage, (&rows, &needed), cancel, writer, buffers),
        Ok(Request::LookUp(_)) => unreachable!("another thread looks up tokens"),
    }
}

/// Sends the logits of rows, as far as they are needed.
fn send_logits(
    stage: &Stage,
    (rows, needed): (&[f32], &[NeededLogits]),
    cancel: &Cancel,
    writer: &Mutex<BufWriter<&UnixStream>>,
    Buffers { logits, words, .. }: &mut Buffers,
) -> Result<(), LinkError> {
    let done = caught(|| {
        stage.logits(rows, cancel, logits).map_err(failure)?;
        if logits.len() != needed.len() * stage.own_tokens().len() {
            let what = format!("{} numbers for the logits of {} rows", rows.len(), needed.len());
            return Err(LinkError::Protocol(what));
        }
        Ok(words_of(stage.options().isa, logits, needed, words))
    });
    send_answer(writer, COMPUTED_LOGITS, done)
}

/// Runs `work`; a panic is an error.
fn caught<T>(work: impl FnOnce() -> Result<T, LinkError>) -> Result<T, LinkError> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(LinkError::Worker("the stage panicked".to_owned())))
}

/// Returns an error of the worker with the message of `error`.
fn worker_error(error: impl std::fmt::Display) -> LinkError {
    LinkError::Worker(error.to_string())
}

/// Receives a request for a stage that reads `width` numbers per token and has `groups` groups; `None` if the
/// connection ended between two requests.
fn receive_request(reader: &mut impl Read, width: usize, groups: usize) -> Result<Option<Request>, LinkError> {
    let mut kind = [0; 4];
    if reader.read(&mut kind[..1])? == 0 {
        return Ok(None);
    }
    reader.read_exact(&mut kind[1..])?;
    let [first, second] = [read_word(reader)? as usize, read_word(reader)? as usize];
    match u32::from_le_bytes(kind) {
        ALLOCATE if first == groups => {
            let mut pages = vec![[0; 8]; groups];
            reader.read_exact(pages.as_flattened_mut())?;
            let pages = pages.into_iter().map(|pages| usize::try_from(u64::from_le_bytes(pages)).unwrap_or(usize::MAX));
            Ok(Some(Request::Allocate(pages.collect())))
        }
        STEP => {
            let step = StageStep::from_bytes(&read_bytes(reader, first)?);
            let step = step.map_err(|error: StepError| LinkError::Protocol(error.to_string()))?;
            let tokens: usize = step.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            let expected = tokens.saturating_mul(width);
            if second != expected {
                let what = format!("{second} hidden states for {tokens} tokens, not {expected}");
                return Err(LinkError::Protocol(what));
            }
            let mut input = vec![0.0; expected];
            reader.read_exact(bytemuck::cast_slice_mut(&mut input))?;
            Ok(Some(Request::Step(step, input)))
        }
        LOOK_UP if second == 0 => Ok(Some(Request::LookUp(read_words(reader, first)?))),
        LOGITS => {
            let needed = read_words(reader, second)?.into_iter().map(needed_logits).collect::<Result<_, _>>()?;
            Ok(Some(Request::Logits(read_numbers(reader, first)?, needed)))
        }
        kind => Err(LinkError::Protocol(format!("request {kind} with {first} and {second}"))),
    }
}

/// Returns the needed logits of a row from a word of a request.
fn needed_logits(word: u32) -> Result<NeededLogits, LinkError> {
    let kinds = [NeededLogits::All, NeededLogits::Largest];
    let found = kinds.into_iter().find(|kind| *kind as u32 == word);
    found.ok_or_else(|| LinkError::Protocol(format!("needed logits must be 0 or 1, got {word}")))
}

fn read_words(reader: &mut impl Read, count: usize) -> Result<Vec<u32>, LinkError> {
    let bytes = read_bytes(reader, count.saturating_mul(size_of::<u32>()))?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

fn write_frame(writer: &mut impl Write, kind: u32, count: usize, bytes: &[u8]) -> Result<(), LinkError> {
    writer.write_all(&kind.to_le_bytes())?;
    writer.write_all(&to_word(count)?.to_le_bytes())?;
    writer.write_all(bytes)?;
    Ok(writer.flush()?)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;
    use std::time::Duration;

    use ferrule_kernels::Pool;
    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::kv::KvFormat;

    use super::*;
    use crate::batch::{Batch, LogitRows, SequenceChunk};
    use crate::quantization::Quantization;
    use crate::spec::ModelSpec;
    use crate::specs;
    use crate::stage::link::{AnswerKind, StageLink, read_numbers};
    use crate::stage::{LastOutput, StagePart, TensorParallelGroup};
    use crate::transformer::LoadOptions;
    use crate::weights::Source;

    fn spec() -> ModelSpec {
        ModelSpec::from_json(&specs::llama(96, 2).to_string()).unwrap()
    }

    /// Loads a stage that has all layers, and the last of `stages` parts of the vocabulary.
    fn load(stages: usize, group: Option<TensorParallelGroup>) -> Stage {
        let quantization = Quantization::named("int8").unwrap();
        let options = LoadOptions { quantization, kv_format: KvFormat::F16, isa: Isa::best() };
        let part = StagePart { layers: 0..2, stage: stages - 1, stages, group };
        let pool = Arc::new(Pool::new(NonZeroUsize::MIN));
        Stage::load(spec(), part, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap()
    }

    /// Returns the bytes of a step with one prompt.
    fn step() -> Vec<u8> {
        let prompt = SequenceChunk {
            tokens: &[3, 1, 4],
            first_position: 0,
            prompt_len: 3,
            pages: &[vec![0]],
            token_types: &[],
            features: &[],
            logits: LogitRows::Last,
            adapter: None,
        };
        StageStep::new(Batch { sequences: &[prompt] }, Vec::new(), LastOutput::Logits).to_bytes()
    }

    #[test]
    fn steps_look_ups_and_logits_have_answers_of_their_own() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || serve_stage(&mut load(2, None), 1 << 20, &theirs, &Cancel::new()));
        let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
        assert_eq!((link.info().first_token, link.info().end_token), (32, 96));
        let width = spec().embedding_width();
        link.allocate_kv(&[4], &Cancel::new()).unwrap();
        link.send_step(&step(), &vec![0.5; 3 * width]).unwrap();
        link.send_look_up(&[48, 95]).unwrap();
        link.send_logits(&vec![0.25; 2 * width], &[NeededLogits::All as u32, NeededLogits::Largest as u32]).unwrap();
        let mut sizes = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..4 {
            let answer = link.receive(&Cancel::new()).unwrap();
            let kind = match answer.kind {
                AnswerKind::Output => 0,
                AnswerKind::LookedUp => 1,
                AnswerKind::Logits => 2,
            };
            sizes[kind].push(read_numbers(&mut link.words(&Cancel::new()), answer.words).unwrap().len());
        }
        // The logits of the step follow its hidden states; the other ones come first if their request is there in time.
        sizes[2].sort_unstable();
        assert_eq!(sizes, [vec![width], vec![2 * width], vec![64, 64 + 3]]);
        link.send_look_up(&[95, 96]).unwrap();
        let error = link.receive(&Cancel::new()).err().unwrap().to_string();
        assert!(error.contains("tokens[1] must be in 32..96, the rows of this worker, got 96"), "{error}");
        assert!(link.receive(&Cancel::new()).is_err(), "the worker has ended");
    }

    #[test]
    fn requests_for_logits_are_checked() {
        for (needed, expected) in
            [(&[0][..], "numbers for the logits of 1 rows"), (&[0, 2], "needed logits must be 0 or 1, got 2")]
        {
            let (ours, theirs) = UnixStream::pair().unwrap();
            std::thread::spawn(move || serve_stage(&mut load(2, None), 1 << 20, &theirs, &Cancel::new()));
            let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
            link.send_logits(&vec![0.25; 2 * spec().embedding_width()], needed).unwrap();
            let error = link.receive(&Cancel::new()).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn logits_are_computed_before_the_steps_that_wait() {
        let (sender, requests) = mpsc::channel();
        let step = || Request::Step(StageStep::from_bytes(&step()).unwrap(), Vec::new());
        for request in [
            step(),
            Request::Logits(vec![1.0], vec![NeededLogits::All]),
            step(),
            Request::Logits(vec![2.0], vec![NeededLogits::All]),
        ] {
            sender.send(Ok(request)).unwrap();
        }
        drop(sender);
        let name = |request| match request {
            Ok(Request::Logits(rows, _)) => format!("{rows:?}"),
            Ok(Request::Step(..)) => "step".to_owned(),
            _ => "another request".to_owned(),
        };
        let order: Vec<String> = logits_first(&requests).map(name).collect();
        assert_eq!(order, ["[1.0]", "[2.0]", "step", "step"]);
    }

    #[test]
    fn a_worker_that_waits_for_another_ends_with_the_connection_to_the_engine() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The other rank never answers.
        let (peer, silent) = UnixStream::pair().unwrap();
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            let mut stage = load(1, Some(TensorParallelGroup::new(0, vec![peer]).unwrap()));
            ended.send(serve_stage(&mut stage, 1 << 20, &theirs, &Cancel::new())).unwrap();
        });
        let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
        link.allocate_kv(&[4], &Cancel::new()).unwrap();
        link.send_step(&step(), &[]).unwrap();
        assert!(end.recv_timeout(Duration::from_millis(300)).is_err(), "the worker waits for the other rank");
        drop(link);
        let served = end.recv_timeout(Duration::from_secs(60)).expect("the worker ends");
        assert!(served.is_err());
        drop(silent);
    }
}
