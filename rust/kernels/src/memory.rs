//! Memory for weights, caches and activations: page-aligned, and backed by physical memory only when written.

use std::fmt;
use std::hint::black_box;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use bytemuck::Pod;

use crate::disjoint::Tiles;
use crate::{Exec, PoolError};

/// Failed memory allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("failed to allocate {bytes} bytes of memory")]
pub struct AllocError {
    /// Bytes requested; `u64::MAX` if the size overflows.
    pub bytes: u64,
}

/// Owned slice that starts on a page boundary. Its pages are zero and take no physical memory until they are written.
pub struct PageSlice<T> {
    start: NonNull<T>,
    len: usize,
    owner: PhantomData<T>,
}

// SAFETY: a `PageSlice` owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for PageSlice<T> {}
// SAFETY: a shared `PageSlice` hands out shared references only.
unsafe impl<T: Sync> Sync for PageSlice<T> {}

impl<T: Pod> PageSlice<T> {
    fn empty() -> Self {
        // Page-aligned, so that it can be cast to any element type.
        const NOWHERE: NonZeroUsize = NonZeroUsize::new(SMALL_PAGE).unwrap();
        Self { start: NonNull::without_provenance(NOWHERE), len: 0, owner: PhantomData }
    }

    /// Allocates `len` elements of zero bytes.
    ///
    /// # Errors
    /// [`AllocError`] if the system refuses the memory.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        const { assert!(align_of::<T>() <= SMALL_PAGE, "a page is aligned to 4096 bytes") };
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return Err(AllocError { bytes: u64::MAX });
        };
        if bytes == 0 {
            return Ok(Self { len, ..Self::empty() });
        }
        let start = map(bytes)?;
        Ok(Self { start: start.cast(), len, owner: PhantomData })
    }

    /// Allocates `len` elements of zero bytes in huge pages of 2 MiB.
    ///
    /// Slices allocated in succession share the huge page at their boundary; freeing one of them splits that page. If
    /// the system has no huge pages, small ones are used.
    ///
    /// # Errors
    /// Same as [`PageSlice::zeroed`].
    pub fn zeroed_in_huge_pages(len: usize) -> Result<Self, AllocError> {
        let bytes = len.saturating_mul(size_of::<T>());
        // Miri does not unmap parts of a mapping.
        if cfg!(miri) || bytes == 0 || bytes > isize::MAX as usize - 2 * HUGE_PAGE {
            return Self::zeroed(len);
        }
        // A whole region may exceed an address space limit that this slice alone does not.
        let start = allocate_in_region(bytes).or_else(|_| map(bytes))?;
        Ok(Self { start: start.cast(), len, owner: PhantomData })
    }
}

/// Smallest page size of supported systems, in bytes.
const SMALL_PAGE: usize = 4096;

/// Size of a huge page, in bytes.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of address space that are mapped at once and shared by many slices. They cost nothing until written.
const REGION: usize = 256 << 20;

/// First address and number of bytes of the unused part of the newest region.
static REGION_LEFT: Mutex<(usize, usize)> = Mutex::new((0, 0));

/// Allocates from the newest region; large blocks get a separate mapping. Each slice unmaps its own part of a
/// region.
fn allocate_in_region(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // SAFETY: reads a system constant.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(HUGE_PAGE);
    let bytes = bytes.next_multiple_of(page);
    if bytes > REGION / 4 {
        return map_in_huge_pages(bytes);
    }
    // Another thread may hold the lock, even a thread that no longer exists after a fork.
    let Ok(mut left) = REGION_LEFT.try_lock() else {
        return if bytes < HUGE_PAGE { map(bytes) } else { map_in_huge_pages(bytes) };
    };
    if left.1 < bytes {
        let region = map_in_huge_pages(REGION)?;
        let (start, rest) = std::mem::replace(&mut *left, (region.as_ptr().expose_provenance(), REGION));
        // SAFETY: this is the unused part of a region, which belongs to no slice.
        unsafe { unmap(std::ptr::with_exposed_provenance_mut(start), rest) };
    }
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(left.0));
    *left = (left.0 + bytes, left.1 - bytes);
    start.ok_or(AllocError { bytes: bytes as u64 })
}

/// Maps zeroed memory that starts on a huge page boundary. `bytes` is a multiple of the page size.
fn map_in_huge_pages(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // The system chooses the address. Map more than needed and keep the part that is aligned.
    let mapped = map(bytes + HUGE_PAGE)?;
    let before = mapped.addr().get().next_multiple_of(HUGE_PAGE) - mapped.addr().get();
    // SAFETY: both ends lie in the mapping just created, which nothing references yet, and start on page boundaries.
    // madvise does not change the contents.
    let start = unsafe {
        let start = mapped.add(before);
        unmap(mapped.as_ptr(), before);
        unmap(start.add(bytes).as_ptr(), HUGE_PAGE - before);
        #[cfg(target_os = "linux")]
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        start
    };
    Ok(start)
}

/// Maps zeroed memory.
fn map(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // SAFETY: maps new anonymous memory at an address that the system chooses; existing mappings are not touched.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    NonNull::new(start.cast::<u8>())
        .filter(|start| start.as_ptr().cast() != libc::MAP_FAILED)
        .ok_or(AllocError { bytes: bytes as u64 })
}

/// Unmaps memory of [`map`].
///
/// # Safety
/// `start` must be the start of a page of a mapping. The `bytes` from there on must belong to the caller and must not be
/// borrowed.
unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: as the caller promised.
        unsafe { libc::munmap(start.cast(), bytes) };
    }
}

/// Bytes that a task of [`touch_pages`] touches.
const TOUCHED_BYTES: usize = 1 << 20;

/// Reads a byte of each page on the thread that will compute with it, if a run over all of `bytes` does: the system
/// places a page of a mapped file on the NUMA node that reads it first.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn touch_pages(exec: &Exec<'_>, bytes: &[u8]) -> Result<(), PoolError> {
    exec.run(bytes.len().div_ceil(TOUCHED_BYTES), |part| {
        let part = &bytes[part * TOUCHED_BYTES..bytes.len().min((part + 1) * TOUCHED_BYTES)];
        black_box(part.iter().step_by(SMALL_PAGE).fold(0, |sum, byte| sum ^ byte));
    })
}

/// Writes a zero into each page of new memory, on the same threads as [`touch_pages`].
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn zero_pages(exec: &Exec<'_>, bytes: &mut [u8]) -> Result<(), PoolError> {
    let parts = Tiles::row_blocks(bytes, 1, TOUCHED_BYTES);
    exec.run(parts.len(), |part| {
        parts.take(part).contiguous().iter_mut().step_by(SMALL_PAGE).for_each(|byte| *byte = 0);
    })
}

/// Reusable buffer for intermediate results. It grows on demand and is kept from call to call.
///
/// # Examples
/// ```
/// use ferrule_kernels::Scratch;
///
/// let mut scratch = Scratch::<f32>::default();
/// scratch.take(3).fill(1.0);
/// assert_eq!(scratch.take(2), [1.0, 1.0]);
/// ```
#[derive(Debug)]
pub struct Scratch<T>(PageSlice<T>);

impl<T: Pod> Default for Scratch<T> {
    fn default() -> Self {
        Self(PageSlice::empty())
    }
}

impl<T: Pod> Scratch<T> {
    /// Returns the first `len` elements. Their contents are unspecified: write before reading.
    ///
    /// # Panics
    /// If memory cannot be allocated.
    pub fn take(&mut self, len: usize) -> &mut [T] {
        if self.0.len < len {
            *self = Self::default();
            // Rows of a tile are far apart: with small pages each of them would be a TLB miss.
            let grown = PageSlice::zeroed_in_huge_pages(len.next_power_of_two());
            self.0 = grown.unwrap_or_else(|error| panic!("{error}"));
        }
        &mut self.0[..len]
    }
}

impl<T> Deref for PageSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: constructors mapped memory for `len` elements of zero bytes, which are valid values of any Pod type.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for PageSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the mapping is private to this value, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for PageSlice<T> {
    fn drop(&mut self) {
        // SAFETY: a slice owns its pages from its start to its end, and nothing borrows it any more.
        unsafe { unmap(self.start.as_ptr().cast(), self.len * size_of::<T>()) };
    }
}

impl<T> fmt::Debug for PageSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageSlice").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Owner of memory that contains weights, such as a mapped file.
pub type BytesOwner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Range of bytes of a shared owner. Keeps the owner alive.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use ferrule_kernels::{BytesOwner, SharedBytes};
///
/// let owner: BytesOwner = Arc::new(vec![1, 2, 3, 4]);
/// let bytes = SharedBytes::new(owner.clone(), 1..3).unwrap();
/// assert_eq!(*bytes, [2, 3]);
/// assert!(SharedBytes::new(owner, 3..5).is_none());
/// ```
#[derive(Clone)]
pub struct SharedBytes {
    owner: BytesOwner,
    range: Range<usize>,
}

impl SharedBytes {
    /// Returns a range of the bytes of `owner`, or `None` if the range is out of bounds.
    #[must_use]
    pub fn new(owner: BytesOwner, range: Range<usize>) -> Option<Self> {
        (*owner).as_ref().get(range.clone())?;
        Some(Self { owner, range })
    }

    /// Returns some of the bytes.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.range.len(),
            "part {range:?} of {} bytes",
            self.range.len()
        );
        let first = self.range.start;
        Self { owner: Arc::clone(&self.owner), range: first + range.start..first + range.end }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBytes").field("range", &self.range).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_aligned() {
        let mut slice = PageSlice::<f32>::zeroed(5000).unwrap();
        assert!(slice.iter().all(|x| *x == 0.0));
        assert_eq!(slice.as_ptr().addr() % 4096, 0);
        slice[4999] = 1.0;
        assert_eq!(slice[4999], 1.0);
        assert!(PageSlice::<u8>::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn slices_in_huge_pages_do_not_overlap() {
        let lens = [1, 4095, 4096, HUGE_PAGE - 1, HUGE_PAGE, (5 << 20) + 4096, REGION / 4 + 1, REGION / 4, 100];
        for _ in 0..3 {
            let mut slices: Vec<_> =
                lens.iter().map(|len| PageSlice::<u8>::zeroed_in_huge_pages(*len).unwrap()).collect();
            for (number, (slice, len)) in (1..).zip(slices.iter_mut().zip(lens)) {
                assert!(slice.iter().all(|byte| *byte == 0) && slice.len() == len);
                assert_eq!(slice.as_ptr().addr() % SMALL_PAGE, 0);
                slice.fill(number);
            }
            let kept = (1..).zip(slices).filter(|(number, _)| number % 3 > 0).collect::<Vec<(u8, _)>>();
            for (number, slice) in kept {
                assert!(slice.iter().all(|byte| *byte == number));
            }
        }
        assert!(PageSlice::<u64>::zeroed_in_huge_pages(usize::MAX / 4).is_err());
    }

    #[test]
    fn scratch_grows_and_keeps_its_contents() {
        let mut scratch = Scratch::<u32>::default();
        assert!(scratch.take(0).is_empty());
        scratch.take(100).fill(7);
        assert_eq!(scratch.take(60), [7; 60]);
        assert_eq!(scratch.take(1 << 20).len(), 1 << 20);
    }

    #[test]
    #[should_panic(expected = "failed to allocate")]
    fn too_much_scratch_is_a_panic() {
        Scratch::<u64>::default().take(1 << 59);
    }

    #[test]
    fn too_large_allocations_are_errors() {
        assert_eq!(PageSlice::<f32>::zeroed(usize::MAX / 2).unwrap_err(), AllocError { bytes: u64::MAX });
        let bytes = 1 << 60;
        assert_eq!(PageSlice::<u8>::zeroed(bytes).unwrap_err(), AllocError { bytes: bytes as u64 });
    }
}
