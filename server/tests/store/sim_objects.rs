//! An object store whose objects are files on the simulated disk.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path as FilePath, PathBuf};

use futures_util::stream::{BoxStream, StreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tidegate_server::session::{Disk as _, OpenMode};

use crate::sim::SimDisk;

/// Objects as files on the disk. They are written as `LocalFileSystem` does it: under a temporary name, then synced and
/// renamed, and the folder synced.
#[derive(Debug)]
pub(crate) struct SimObjects {
    pub(crate) disk: SimDisk,
    pub(crate) folder: PathBuf,
}

impl fmt::Display for SimObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("objects on a simulated disk")
    }
}

fn generic(error: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "simulated", source: error.into() }
}

impl SimObjects {
    fn file(&self, location: &Path) -> PathBuf {
        self.folder.join(location.as_ref())
    }

    fn write(&self, path: &FilePath, bytes: &[u8]) -> io::Result<()> {
        let new = PathBuf::from(format!("{}#1", path.display()));
        let file = self.disk.open(&new, OpenMode::Replace)?;
        file.write_at(bytes, 0)?;
        file.sync()?;
        self.disk.rename(&new, path)?;
        self.disk.sync_folder(path.parent().expect("a folder"))
    }

    fn objects(&self) -> Vec<ObjectMeta> {
        let files = self.disk.files();
        let files = files.into_iter().filter_map(|(path, size)| {
            let location =
                path.strip_prefix(&self.folder).ok()?.to_str().filter(|name| name.starts_with("objects/"))?;
            Some(ObjectMeta {
                location: Path::parse(location).ok()?,
                last_modified: chrono::DateTime::UNIX_EPOCH,
                size,
                e_tag: None,
                version: None,
            })
        });
        files.filter(|object| !object.location.as_ref().contains('#')).collect()
    }
}

#[async_trait::async_trait]
impl ObjectStore for SimObjects {
    async fn put_opts(&self, location: &Path, payload: PutPayload, _: PutOptions) -> Result<PutResult> {
        self.write(&self.file(location), &bytes::Bytes::from(payload)).map_err(generic)?;
        Ok(PutResult { e_tag: None, version: None, extensions: object_store::Extensions::default() })
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        unimplemented!("the store puts whole objects")
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let found = self.disk.content(&self.file(location));
        let memory = InMemory::new();
        if let Some(bytes) = found {
            memory.put(location, bytes.into()).await?;
        }
        memory.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (disk, folder) = (self.disk.clone(), self.folder.clone());
        let remove = move |location: Result<Path>| {
            let location = location?;
            match disk.remove(&folder.join(location.as_ref())) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(generic(error)),
                _ => Ok(location),
            }
        };
        locations.map(remove).boxed()
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        futures_util::stream::iter(self.objects().into_iter().map(Ok)).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        unimplemented!("the store lists everything")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unimplemented!("the store copies nothing")
    }
}
